"""`task.generate`: prompts to requests, and completions to text."""

import numpy as np

from keras_posttrain.data.chat import chat
from keras_posttrain.data.rows.columns import check_characters
from keras_posttrain.data.rows.images import COLUMNS, refuse_images
from keras_posttrain.data.rows.prompt_encoder import PromptEncoder
from keras_posttrain.distribution import processes
from keras_posttrain.rollout import Request
from keras_posttrain.training import checks

PROMPTS = ("messages", "prompt", "prompt_ids")


def complete(
    engine, settings, prompts, *, num_generations=1, stop_token_ids="auto",
    seed=None, return_token_ids=False, on_text=None, verbose=0, **sampling,
):  # fmt: skip
    """Completes prompts with the `RowSettings` of a task.

    See `Task.generate`.
    """
    tokenizer = settings.tokenizer
    prompts, one = _as_list(prompts)
    if on_text is not None and not callable(on_text):
        raise ValueError(
            "`on_text` must be a function of `index, text`, or None. "
            f"Received: on_text={on_text!r}"
        )
    encoded = [_encode(settings, i, p) for i, p in enumerate(prompts)]
    if not return_token_ids or on_text is not None:
        checks.need_tokenizer(tokenizer, "generate")
    # One seed for all: equal prompts still differ in their samples.
    if seed is None:
        seed = processes.from_first(np.random.randint(2**31))
    requests = [
        Request(
            ids,
            num_generations=num_generations,
            stop_token_ids=_stop(tokenizer, stop_token_ids),
            seed=seed,
            images=images,
            **sampling,
        )
        for ids, images in encoded
    ]
    stream = None
    if on_text is not None:
        stream = _TextStream(tokenizer, num_generations, on_text)
    shown = bool(verbose) and processes.is_first()
    out = engine.generate(requests, on_tokens=stream, progress=shown)
    if stream is not None:
        stream.end()
    answers = [
        [
            c.token_ids if return_token_ids else tokenizer.decode(c.token_ids)
            for c in group
        ]
        for group in out
    ]
    if num_generations == 1:
        answers = [x[0] for x in answers]
    return answers[0] if one else answers


def complete_rows(engine, tokenizer, examples, max_tokens, seed=0):
    """Completes rows greedily, to be compared with their own completions.

    Returns a list of dicts of `prompt`, `completion` and `reference`, texts,
    and of `is_cut`, whether `max_tokens` were reached.
    """
    cut = []
    for example in examples:
        trained = example.completion_mask != 0
        first = int(np.argmax(trained))
        # Only the first answer, because a chat may continue after it.
        answer = np.cumprod(trained[first:]).sum()
        ids = example.token_ids
        images = example.images and example.images.before(first)
        cut.append((ids[:first], images, ids[first : first + answer]))
    requests = [
        Request(
            prompt.tolist(),
            max_tokens=max_tokens,
            temperature=0,
            stop_token_ids=_stop(tokenizer, "auto"),
            seed=seed,
            images=images,
        )
        for prompt, images, _ in cut
    ]
    groups = engine.generate(requests)
    return [
        {
            "prompt": tokenizer.decode(
                prompt.tolist(), skip_special_tokens=False
            ),
            "completion": tokenizer.decode(completion.token_ids),
            "reference": tokenizer.decode(rest.tolist()),
            "is_cut": completion.finish_reason == "length",
        }
        for (prompt, _, rest), [completion] in zip(cut, groups)
    ]


def _stop(tokenizer, stop_token_ids):
    ids = checks.stop_token_ids(stop_token_ids)
    if ids != "auto":
        return ids
    checks.need_tokenizer(tokenizer, "stop_token_ids='auto'")
    return tuple(tokenizer.stop_token_ids)


def _encode(settings, row, prompt):
    """Returns the token ids of a prompt and its `Images` or `None`."""
    if isinstance(prompt, dict):
        if set(prompt) & set(COLUMNS):
            return _with_images(settings, f"prompt {row}", prompt)
        if set(prompt) != {"prompt_ids"}:
            raise _wrong_keys(prompt, f"prompt {row}")
        ids = prompt["prompt_ids"]
        if isinstance(ids, (str, bytes)) or not np.iterable(ids):
            raise ValueError(
                "`prompt_ids` must be a list of ints. Received: prompt "
                f"{row} with prompt_ids={ids!r}"
            )
        return ids, None
    return _text_ids(settings, row, prompt), None


def _wrong_keys(prompt, where):
    known = [k for k in ("prompt", "messages") if k in prompt]
    fix = f" Of a row, pass row[{known[0]!r}]." if known else ""
    return ValueError(
        "A prompt must be a str, a list of messages or {'prompt_ids': [...]}, "
        "with images {'messages': [...], 'images': [...]}. Received: "
        f"{where}, a dict with the keys {sorted(prompt)}.{fix}"
    )


def _with_images(settings, where, row):
    given = [kind for kind in PROMPTS if kind in row]
    if len(given) != 1 or set(row).difference(COLUMNS, given):
        raise _wrong_keys(row, where)
    if settings.images is None:
        refuse_images(row, where)
        if row.get("image") is not None:
            raise _wrong_keys(row, where)
    if given == ["messages"]:
        row = {"prompt": row["messages"], **row}
    row = {k: v for k, v in row.items() if k != "messages"}
    encoded = PromptEncoder(settings)(0, row, where)
    prompt = encoded.build(encoded.sides)
    return prompt.token_ids, prompt.images


def _text_ids(settings, row, prompt):
    tokenizer = settings.tokenizer
    if not isinstance(prompt, (str, list, tuple)):
        raise ValueError(
            "A prompt must be a str, a list of messages or {'prompt_ids': "
            f"[...]}}. Received: prompt {row}, which is {prompt!r:.200}"
        )
    check_characters(prompt, f"prompt {row}")
    if isinstance(prompt, str):
        checks.need_tokenizer(tokenizer, "a text prompt")
        return tokenizer.encode(prompt, add_special_tokens=True)
    checks.need_tokenizer(tokenizer, "messages")
    return chat.render_ids(
        tokenizer,
        prompt,
        add_generation_prompt=True,
        **(settings.chat_template_kwargs or {}),
    )


class _TextStream:
    """Turns new tokens into new text, for the `on_text` of `Task.generate`."""

    def __init__(self, tokenizer, num_generations, on_text):
        self.tokenizer, self.on_text = tokenizer, on_text
        self.num_generations = num_generations
        self.ids, self.texts = {}, {}

    def __call__(self, request, generation, token_ids):
        index = request * self.num_generations + generation
        self.ids.setdefault(index, []).extend(token_ids)
        text = self.tokenizer.decode(self.ids[index])
        # Bytes of an incomplete character wait for the rest of it.
        self._report(index, text.rstrip("\ufffd"))

    def end(self):
        for index, ids in self.ids.items():
            self._report(index, self.tokenizer.decode(ids))

    def _report(self, index, text):
        new = text[len(self.texts.get(index, "")) :]
        if new:
            self.texts[index] = text
            self.on_text(index, new)


def _as_list(prompts):
    """Returns `(list of prompts, whether one prompt was given)`."""
    if isinstance(prompts, (str, dict)):
        return [prompts], True
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            "`prompts` must be a str, a list of messages, "
            "{'prompt_ids': [...]}, or a list of these. "
            f"Received: {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], dict) and "role" in prompts[0]:
        return [prompts], True
    return list(prompts), False
