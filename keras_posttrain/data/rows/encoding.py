"""Encodes one row of each type as token ids with weights."""

import dataclasses
import itertools
import json

import numpy as np

from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.template import TemplateFault
from keras_posttrain.data.rows import columns
from keras_posttrain.data.rows.images import with_parts

TRAIN_ON = ("auto", "completion", "assistant", "all")


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedText:
    """A row of text as tokens, and their offsets in the text.

    Args:
        token_ids: int64 array of shape `(length,)`.
        mask: float32 array of shape `(length,)`.
        text: string, the text that was encoded.
        offsets: int64 array of shape `(length, 2)`, the start and end of
            each token in characters of the text; equal for tokens that are
            not in the text.
        spans: list of `(start, end, words)`, the parts of the text that are
            trained on, and where the row's own words begin in each. Where a
            whole conversation is trained on no offsets are known: there are
            no spans, and the text is empty.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    text: str
    offsets: np.ndarray
    spans: list


def check_train_on(train_on):
    """Raises where `train_on` is not one of the choices."""
    if train_on not in TRAIN_ON:
        raise ValueError(
            f"`train_on` must be one of {TRAIN_ON}. Received: {train_on=}."
        )


def read_images(row, settings, where):
    """Returns the `Pictures` of a row, as of `ImageReader.read`."""
    if settings.images is None:
        return None
    return settings.images.read(row, where)


def num_image_tokens(pictures):
    """Counts the tokens of images, as of `read_images`."""
    return 0 if pictures is None else sum(pictures.counts)


def place_images(pictures, token_ids, settings, where):
    """Returns the `Images` of a sequence, or `None` without any."""
    if pictures is None:
        return None
    return settings.images.place(pictures, token_ids, where)


def encode_row(row, kind, settings, train_on, where, pictures=None):
    """Encodes a row and weights its tokens, without the row's own weight.

    `kind` is the row's type, `settings` are `RowSettings`, `train_on` is one
    of `TRAIN_ON`, and `where` names the row in an error. `pictures` are those
    of `read_images`. Tokens of images have no weight.

    Returns:
        `(token_ids, mask)` as of `EncodedText`.
    """
    ids, mask = _encode_row(row, kind, settings, train_on, where, pictures)
    if pictures is not None:
        mask[place_images(pictures, ids, settings, where).tokens] = 0.0
    return ids, mask


def _encode_row(row, kind, settings, train_on, where, pictures):
    if kind == "token_pairs":
        return _token_pairs(row, train_on, where)
    if kind == "masked_tokens":
        return _masked_tokens(row, train_on, where)
    if kind == "tokens":
        _check_part(train_on, kind, where)
        ids = columns.int_array(row["token_ids"], where, "token_ids")
        return ids, mask_after(0, len(ids))
    encoded = encode_text(row, kind, settings, train_on, where, pictures)
    return encoded.token_ids, encoded.mask


def encode_text(row, kind, settings, train_on, where, pictures=None):
    """Encodes a row of text as `EncodedText`; see `encode_row`."""
    tokenizer = settings.tokenizer
    if tokenizer is None:
        raise ValueError(
            "Rows of text need a tokenizer. Received: tokenizer=None, "
            f"{where} has {columns.describe(kind)}. Pass rows with "
            "'prompt_ids' and 'completion_ids', or a model with a tokenizer."
        )
    count = 0 if pictures is None else len(pictures)
    if kind == "text":
        refuse_tools(row, where)
        refuse_images_of_text(count, where)
        return _text(row, tokenizer, train_on, where)
    if kind == "messages":
        messages, first = row["messages"], 0
    elif isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        refuse_tools(row, where)
        refuse_images_of_text(count, where)
        return _strings(row, tokenizer, train_on, where)
    else:
        messages, first = _join(row, where)
    try:
        messages = with_parts(messages, count, where)
        return _chat(row, messages, first, kind, settings, train_on, pictures)
    except TemplateFault:
        raise
    except ValueError as error:
        raise ValueError(f"In {where}: {error}") from error


def refuse_images_of_text(count, where):
    """Raises where a row of plain text has images: nothing renders them."""
    if count:
        raise ValueError(
            "Images are a part of messages, and a row of plain text has none. "
            f"Received: {where} with {count} images. Give its prompt as a "
            "list of messages."
        )


def _check_part(train_on, kind, where):
    """Raises where rows without messages have no part `train_on`."""
    whole = kind in ("text", "tokens")
    parts = ("all",) if whole else ("completion", "all")
    if train_on not in ("auto", *parts):
        raise ValueError(
            f"Rows with {columns.describe(kind)} can be trained on "
            f"{' or '.join(map(repr, parts))}. Received: {train_on=} for "
            f"{where}. Use train_on='auto'."
        )


def mask_after(first, length):
    """Returns a mask of 1 from token `first` on, 0 before it."""
    return (np.arange(length) >= first).astype(np.float32)


def join_ids(row, prompt, completion, where):
    """Returns the ids of two columns in a row, and how many the prompt has."""
    before = columns.int_array(row[prompt], where, prompt)
    after = columns.int_array(row[completion], where, completion)
    return np.concatenate([before, after]), len(before)


def _token_pairs(row, train_on, where):
    _check_part(train_on, "token_pairs", where)
    ids, first = join_ids(row, "prompt_ids", "completion_ids", where)
    return ids, mask_after(0 if train_on == "all" else first, len(ids))


def _masked_tokens(row, train_on, where):
    _check_part(train_on, "masked_tokens", where)
    ids = columns.int_array(row["token_ids"], where, "token_ids")
    mask = columns.weight_array(
        row["completion_mask"], where, "completion_mask"
    )
    if len(mask) != len(ids):
        raise ValueError(
            "The columns 'token_ids' and 'completion_mask' must have one "
            f"length. Received: {where} with {len(ids)} token ids and "
            f"{len(mask)} mask entries."
        )
    return ids, np.ones_like(mask) if train_on == "all" else mask


def encode_opened(tokenizer, text):
    """Encodes a text with a start token, unless it begins with one."""
    bos = tokenizer.special_tokens.get("bos_token")
    opened = bool(bos) and text.startswith(bos)
    return tokenizer.encode_with_offsets(text, not opened)


def _ended(tokenizer, text, where):
    """Encodes a text with an end token: `(ids, offsets)`, both arrays."""
    ids, offsets = encode_opened(tokenizer, text)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "A text must be ended with the end token, and this tokenizer has "
            f"none. Received: eos_token_id=None for {where}. Set `eos_token` "
            "in the preset's `tokenizer_config.json`."
        )
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
        offsets = [*offsets, (len(text), len(text))]
    return np.array(ids, np.int64), np.array(offsets, np.int64)


def _text(row, tokenizer, train_on, where):
    text = row["text"]
    if not isinstance(text, str):
        raise columns.wrong_type(where, "text", "a string", text)
    _check_part(train_on, "text", where)
    ids, offsets = _ended(tokenizer, text, where)
    mask = np.ones(len(ids), np.float32)
    return EncodedText(ids, mask, text, offsets, [(0, len(text), 0)])


def _strings(row, tokenizer, train_on, where):
    _check_part(train_on, "prompt_completion", where)
    prompt, text = row["prompt"], row["prompt"] + row["completion"]
    ids, offsets = _ended(tokenizer, text, where)
    first = 0 if train_on == "all" else len(prompt)
    mask = np.ones(len(ids), np.float32)
    if train_on != "all":
        # A token that crosses the boundary is part of the completion.
        mask[:-1] = offsets[:-1, 1] > first
    spans = [(first, len(text), first)]
    return EncodedText(ids, mask, text, offsets, spans)


def _join(row, where):
    """Joins both sides to one conversation; finds the completion in it."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    for column, side in (("prompt", prompt), ("completion", completion)):
        if not isinstance(side, (list, tuple)):
            raise columns.wrong_type(
                where, column, "a string or a list of messages", side
            )
    if not completion:
        raise ValueError(
            "The column 'completion' must hold at least one message. "
            f"Received: {where}, completion=[]."
        )
    return [*prompt, *completion], len(prompt)


def tools_of(row):
    """Returns the tools of a row, a list of dicts, or `None`."""
    tools = row.get("tools")
    if isinstance(tools, str):
        # Tables without free-form dicts store them as JSON.
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            pass
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)) or not all(
        isinstance(tool, dict) for tool in tools
    ):
        raise ValueError(
            "The column 'tools' must be a list of dicts, or that as JSON. "
            f"Received: tools={row['tools']!r:.200}."
        )
    return list(tools)


def refuse_tools(row, where):
    """Raises where a row of plain text has tools: nothing renders them."""
    if tools_of(row):
        raise ValueError(
            "Only a chat template renders tools, and a row of plain text has "
            f"none. Received: {where} with tools={row['tools']!r:.200}. Give "
            "its text as messages, or remove the column 'tools'."
        )


def _chat(row, messages, first, kind, settings, train_on, pictures):
    tokenizer = settings.tokenizer
    template_kwargs = dict(settings.chat_template_kwargs or {})
    if pictures is not None:
        texts = settings.images.texts(tokenizer, pictures)
        template_kwargs["image_texts"] = texts
    if train_on == "all":
        ids = chat.render_ids(
            tokenizer, messages, tools=tools_of(row), **template_kwargs
        )
        return EncodedText(
            np.array(ids, np.int64),
            np.ones(len(ids), np.float32),
            text="",
            offsets=np.zeros((len(ids), 2), np.int64),
            spans=[],
        )
    ids, offsets, text, spans = chat.encode_with_spans(
        tokenizer, messages, tools=tools_of(row), **template_kwargs
    )
    turns = [message["role"] for message in messages]
    if "assistant" not in turns and settings.truncation == "error":
        raise ValueError(
            "A conversation must have a turn of the role 'assistant', which "
            f"is trained on. Received: roles={turns}, none of which carries "
            "loss."
        )
    if kind == "prompt_completion" and train_on != "assistant":
        spans = _from_message(spans, first)
    elif kind == "messages" and train_on == "completion":
        spans = spans[-1:]
    numbers = itertools.chain.from_iterable(offsets)
    places = np.fromiter(numbers, np.int64, 2 * len(ids)).reshape(-1, 2)
    mask = np.zeros(len(ids), np.float32)
    for start, end, _ in spans:
        mask[(places[:, 1] > start) & (places[:, 0] < end)] = 1.0
    spans = [
        (start, end, _words(text, start, end, messages, message))
        for start, end, message in spans
    ]
    return EncodedText(np.array(ids, np.int64), mask, text, places, spans)


def _words(text, start, end, messages, message):
    """Finds where a message's content begins in its rendered turn."""
    content = None if message is None else messages[message].get("content")
    if isinstance(content, str):
        return max(text.find(content.strip(), start, end), start)
    return start


def _from_message(spans, first):
    if any(message is None for _, _, message in spans):
        raise ValueError(
            "A template with several `{% generation %}` blocks for one turn "
            "does not say where the completion begins. Pass the row as "
            "'messages', or use train_on='assistant'."
        )
    return [span for span in spans if span[2] >= first]
