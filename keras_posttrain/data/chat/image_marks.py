"""The marks of images in a rendered conversation, and what replaces them."""

import bisect

MARK = "<start_of_image>"


def expand_images(conversation, text, plain, image_text):
    """Replaces the mark that a template writes for an image.

    Args:
        conversation: `Conversation`.
        text: string, what it renders.
        plain: list of `(start, end)`, the control tokens in it that messages
            quote.
        image_text: string, the text of an image's tokens, or `None` where
            images are refused.

    Returns:
        Tuple `(text, plain, place)`: the new text, the same places in it,
        and a function from a place in the old text to that in the new one.

    Raises:
        ValueError: there are images, and they are refused; or the template
            does not write a mark for each.
    """
    count = sum(
        isinstance(part, dict) and part.get("type") == "image"
        for message in conversation.messages
        if isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )
    if not count:
        return text, plain, lambda place: place
    if image_text is None:
        raise ValueError(
            "Messages have parts of type 'image', which are not read here. "
            f"Received: {count} of them. Give the images too, as the column "
            "'images' of rows, to a model with a vision tower "
            "(`from_preset(..., vision=True)`)."
        )
    quoted = set(plain)
    marks = [
        (start, end)
        for start, end in conversation.tokenizer.find_control_tokens(text)
        if text[start:end] == MARK and (start, end) not in quoted
    ]
    if len(marks) != count:
        raise ValueError(
            f"The chat template must write {MARK!r} for each part of type "
            f"'image'. Received: {count} parts and {len(marks)} marks. Pass "
            "another `chat_template=`."
        )
    ends = [end for _, end in marks]
    longer = len(image_text) - len(MARK)

    def place(index):
        return index + longer * bisect.bisect_right(ends, index)

    pieces, at = [], 0
    for start, end in marks:
        pieces += [text[at:start], image_text]
        at = end
    pieces.append(text[at:])
    plain = [(place(start), place(end)) for start, end in plain]
    return "".join(pieces), plain, place
