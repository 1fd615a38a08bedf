"""The marks of images in a rendered conversation, and what replaces them."""

import bisect
import dataclasses

# Parts of messages that templates have marks for, and nothing here reads.
_UNREAD = ("audio", "video")


@dataclasses.dataclass(frozen=True)
class ImageTexts:
    """What stands in a text for the images of a conversation.

    Args:
        mark: string, the control token that a template writes for an image.
        texts: list of strings, the text of each image's tokens.
    """

    mark: str
    texts: list


def _count_parts(conversation, kinds):
    return sum(
        isinstance(part, dict) and part.get("type") in kinds
        for message in conversation.messages
        if isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )


def expand_images(conversation, text, plain, images):
    """Replaces the mark that a template writes for an image.

    Args:
        conversation: `Conversation`.
        text: string, what it renders.
        plain: list of `(start, end)`, the control tokens in it that messages
            quote.
        images: `ImageTexts`, or `None` where images are refused.

    Returns:
        Tuple `(text, plain, place)`: the new text, the same places in it,
        and a function from a place in the old text to that in the new one.

    Raises:
        ValueError: there are images, and they are refused; there is sound or
            a video; or the template does not write a mark for each image.
    """
    if unread := _count_parts(conversation, _UNREAD):
        raise ValueError(
            "Sound and videos are not read: messages must have no parts of "
            f"type 'audio' or 'video'. Received: {unread} of them. Remove "
            "them, or give frames of a video as images."
        )
    count = _count_parts(conversation, ("image",))
    if not count:
        return text, plain, lambda place: place
    if images is None:
        raise ValueError(
            "Messages have parts of type 'image', which are not read here. "
            f"Received: {count} of them. Give the images too, as the column "
            "'images' of rows, to a model with a vision tower "
            "(`from_preset(..., vision=True)`)."
        )
    quoted, mark = set(plain), images.mark
    marks = [
        (start, end)
        for start, end in conversation.tokenizer.find_control_tokens(text)
        if text[start:end] == mark and (start, end) not in quoted
    ]
    if len(marks) != count:
        raise ValueError(
            f"The chat template must write {mark!r} for each part of type "
            f"'image'. Received: {count} parts and {len(marks)} marks. Pass "
            "another `chat_template=`."
        )
    ends = [end for _, end in marks]
    # How much longer the text is behind so many images.
    longer = [0]
    for image in images.texts:
        longer.append(longer[-1] + len(image) - len(mark))

    def place(index):
        return index + longer[bisect.bisect_right(ends, index)]

    pieces, at = [], 0
    for (start, end), image in zip(marks, images.texts, strict=True):
        pieces += [text[at:start], image]
        at = end
    pieces.append(text[at:])
    plain = [(place(start), place(end)) for start, end in plain]
    return "".join(pieces), plain, place
