"""Messages to text and tokens by a chat template, with the assistant's spans.

The content of a message stays text: a control token that a message quotes is
never parsed as one, while those that the template writes are.
"""

from keras_posttrain.data.chat.control_tokens import quoted_places
from keras_posttrain.data.chat.spans import text_and_spans
from keras_posttrain.data.chat.template import call_template, clean_messages


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
    messages = clean_messages(messages)
    return call_template(
        tokenizer, messages, add_generation_prompt, tools, kwargs
    )


def render_ids(
    tokenizer, messages, *, add_generation_prompt=False, tools=None, **kwargs
):
    """Encodes rendered messages.

    Control tokens inside the messages are encoded as text. Takes what
    `render` takes.

    Returns:
        List of ints.
    """
    messages = clean_messages(messages)
    text = call_template(
        tokenizer, messages, add_generation_prompt, tools, kwargs
    )
    plain = quoted_places(
        tokenizer, text, messages, add_generation_prompt, tools, kwargs
    )
    return tokenizer.encode_mixed(text, plain)[0]


def encode_with_spans(tokenizer, messages, *, tools=None, **kwargs):
    """Encodes a conversation and finds the assistant's text in it.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        tools: list of dicts, or `None`.
        **kwargs: further variables of the template.

    Returns:
        Tuple `(ids, offsets, text, spans)`: a list of ints, a list of
        `(start, end)` in characters of the rendered text, that text, and a
        list of `(start, end, message index)` in the same characters.

    Raises:
        ValueError: the template refuses the messages, or the assistant's
            turns cannot be found.
    """
    messages = clean_messages(messages)
    text, plain, spans = text_and_spans(tokenizer, messages, tools, kwargs)
    return *tokenizer.encode_mixed(text, plain), text, spans


def render_with_spans(tokenizer, messages, *, tools=None, **kwargs):
    """Renders a conversation and finds the assistant's text in it.

    A span is a turn's text up to and with the token that ends it. Text that
    the template puts after that token, such as a newline, is not in it.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        tools: list of dicts, or `None`.
        **kwargs: further variables of the template.

    Returns:
        Tuple `(text, spans)`: a string, and a list of `(start, end)` in its
        characters, one for each assistant turn (for each
        `{% generation %}` block where the template has them).

    Raises:
        ValueError: the template refuses the messages, or the assistant's
            turns cannot be found.
    """
    messages = clean_messages(messages)
    text, _, spans = text_and_spans(tokenizer, messages, tools, kwargs)
    return text, [(start, end) for start, end, _ in spans]
