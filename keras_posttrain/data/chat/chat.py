"""Messages to text and tokens by a chat template, with the assistant's spans.

The content of a message stays text: a control token that a message quotes is
never parsed as one, while those that the template writes are.
"""

from keras_posttrain.data.chat.control_tokens import quoted_places
from keras_posttrain.data.chat.image_marks import expand_images
from keras_posttrain.data.chat.spans import text_and_spans
from keras_posttrain.data.chat.template import (
    Conversation,
    check_roles,
    check_tools,
    clean_messages,
)


def render(
    tokenizer, messages, *, add_generation_prompt=False, tools=None, **kwargs
):
    """Renders messages with the tokenizer's chat template.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        add_generation_prompt: bool, whether the text ends where the model's
            turn begins.
        tools: list of dicts, the tools' JSON schemas, or `None`.
        **kwargs: further variables of the template, such as
            `enable_thinking=False`.

    Returns:
        String.

    Raises:
        ValueError: there is no template, or it refuses the messages.
    """
    return _rendered(
        tokenizer, messages, tools, kwargs, add_generation_prompt
    )[1]


def render_ids(
    tokenizer,
    messages,
    *,
    add_generation_prompt=False,
    tools=None,
    image_texts=None,
    **kwargs,
):
    """Encodes rendered messages.

    Control tokens inside the messages are encoded as text. Takes what
    `render` takes, and `image_texts`, the `ImageTexts`, or `None` where
    images are refused.

    Returns:
        List of ints.
    """
    conversation, text = _rendered(
        tokenizer, messages, tools, kwargs, add_generation_prompt
    )
    plain = quoted_places(conversation, text)
    text, plain, _ = expand_images(conversation, text, plain, image_texts)
    return tokenizer.encode_mixed(text, plain)[0]


def _checked(tokenizer, messages, *settings):
    """Returns a `Conversation` of messages in order."""
    messages = clean_messages(messages)
    check_roles(messages, tokenizer.chat_template or "")
    return Conversation(tokenizer, messages, *settings)


def _rendered(*settings):
    """Returns a checked `Conversation` and its text."""
    conversation = _checked(*settings)
    text = conversation.render()
    check_tools(conversation)
    return conversation, text


def encode_with_spans(
    tokenizer, messages, *, tools=None, image_texts=None, **kwargs
):
    """Encodes a conversation and finds the assistant's text in it.

    Takes what `render_ids` takes, but for a generation prompt.

    Returns:
        Tuple `(ids, offsets, text, spans)`: a list of ints, a list of
        `(start, end)` in characters of the rendered text, that text, and the
        spans of `text_and_spans` in the same characters.

    Raises:
        ValueError: the template refuses the messages, or the assistant's
            turns cannot be found.
    """
    conversation = _checked(tokenizer, messages, tools, kwargs)
    text, plain, spans = text_and_spans(conversation)
    check_tools(conversation)
    text, plain, place = expand_images(conversation, text, plain, image_texts)
    spans = [(place(start), place(end), i) for start, end, i in spans]
    return *tokenizer.encode_mixed(text, plain), text, spans
