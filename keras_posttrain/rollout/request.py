"""Requests to engines and what they return, with checks of requests."""

import dataclasses
import numbers
import operator
import reprlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt with its sampling settings.

    `top_k`, `top_p` and `min_p` apply in this order, each to the tokens that
    the previous ones kept. Log-probabilities are those of the distribution at
    `temperature` before this truncation.

    Args:
        token_ids: ints, the prompt; for a conversation, all tokens so far.
        num_generations: int, the number of samples of this prompt.
        max_tokens: int, the most new tokens of a sample.
        temperature: float; 0 always samples the most probable token.
        top_k: int or `None`, sample among this many most probable tokens.
        top_p: float in (0, 1] or `None`, sample among the fewest tokens with
            this total probability.
        min_p: float in [0, 1] or `None`, sample among tokens at least this
            many times as probable as the most probable one.
        stop_token_ids: ints; a sample ends with the first of them.
        seed: int, or `None` for a random one. A sample depends only on the
            seed, the prompt, its index among the samples of the prompt, and
            the weights.
        drawn: int, the number of tokens at the end of `token_ids` that were
            sampled before an interruption; 0 for a new sample.
        first_sample: int or `None`, the index of the first sample among those
            of its prompt. By default equal requests of a call are counted.
        return_routed_experts: bool, whether completions have the experts of
            their tokens. The built-in engine records them in mixtures of
            experts; other engines refuse it.
        images: `None`, or the images of the prompt as rows have them: with
            `vision=True` the `images` of `task.prepare(rows)[0][0]`, whose
            `token_ids` are those of this prompt and its completion. The
            built-in engine reads them; other engines refuse them.

    Example:

    ```python
    request = kpt.rollout.Request(ids, num_generations=2, max_tokens=4, seed=0)
    [completions] = engine.generate([request])
    [task.tokenizer.decode(c.token_ids) for c in completions]
    ```
    """

    token_ids: tuple
    num_generations: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_token_ids: tuple = ()
    seed: int | None = None
    drawn: int = 0
    first_sample: int | None = None
    return_routed_experts: bool = False
    images: object = None

    def __post_init__(self):
        for name in ("token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids is None and name == "stop_token_ids":
                ids = ()
            try:
                ids = tuple(operator.index(x) for x in ids)
            except TypeError:
                raise ValueError(
                    f"`{name}` of a request must be ints. "
                    f"Received: {name}={reprlib.repr(ids)}"
                ) from None
            object.__setattr__(self, name, ids)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample of a request.

    Attributes:
        token_ids: list of ints, the new tokens, a stop token included.
        per_token_logps: float32 array of shape `(tokens,)`:
            `log_softmax(logits / temperature)` of each token, over the full
            vocabulary; at temperature 0 that of temperature 1.
        finish_reason: `"stop"` or `"length"`; `"interrupted"` if
            `Rollout.interrupt` ended the call before the sample.
        weight_version: int, the version of the weights that sampled the last
            token.
        token_versions: int32 array of shape `(tokens,)`, the version of the
            weights that sampled each token.
        routed_experts: int16 array of shape
            `(prompt and completion tokens - 1, mixtures, top_k)`, the experts
            that each token but the last chose in each layer that has some;
            or `None`.

    Example:

    ```python
    request = kpt.rollout.Request(ids, max_tokens=4, temperature=0)
    [[completion]] = engine.generate([request])
    completion.token_ids, completion.finish_reason
    ```
    """

    token_ids: list
    per_token_logps: np.ndarray
    finish_reason: str
    weight_version: int
    token_versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    def __post_init__(self):
        if self.token_versions is None:
            versions = np.full(
                len(self.token_ids), self.weight_version, "int32"
            )
            object.__setattr__(self, "token_versions", versions)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of given tokens.

    Attributes:
        per_token_logps: float32 array of shape `(tokens,)`; that of the
            first token is 0.
        top_ids: int32 array of shape `(tokens, k)`, the most probable tokens
            at each position, best first, or `None`. The first row is 0.
        top_logps: float32 array of shape `(tokens, k)`, their
            log-probabilities, or `None`. The first row is 0.

    Example:

    ```python
    [scores] = engine.score([ids], top_k=2)
    scores.per_token_logps
    scores.top_ids[-1]
    ```
    """

    per_token_logps: np.ndarray
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None


def content_of(images):
    """Returns bytes that differ between images, empty for `None`."""
    return b"" if images is None else images.digest


# --- Checks ------------------------------------------------------------------


def is_int(x):
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x):
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def need(holds, expected, **received):
    if not holds:
        (name, value), *where = received.items()
        where = "".join(f" of {k} {v}" for k, v in where)
        raise ValueError(f"{expected}. Received: {name}={value!r}{where}")


def check_requests(
    requests, vocabulary_size, max_length=None, image_reader=None
):
    """Checks requests and returns them as a list.

    A `ValueError` names the request, the field and its value. `max_length` is
    the most tokens of a sequence, or `None`; `image_reader` the `ImageReader`
    of a model with a vision tower, or `None`.
    """
    if isinstance(requests, Request):
        raise ValueError(
            "`requests` must be a list of `Request`s. Received: one "
            "`Request`; put it in a list."
        )
    requests = list(requests)
    for i, r in enumerate(requests):
        need(
            isinstance(r, Request),
            "`requests` must be a list of `kpt.rollout.Request`s",
            requests=type(r).__name__,
            item=i,
        )
        for name in ("num_generations", "max_tokens"):
            value = getattr(r, name)
            need(
                is_int(value) and value >= 1,
                f"`{name}` must be a positive int",
                **{name: value},
                request=i,
            )
        _check_sampling(i, r)
        if r.seed is not None:
            need(is_int(r.seed), "`seed` must be an int", seed=r.seed,
                  request=i)  # fmt: skip
        need(
            is_int(r.drawn) and 0 <= r.drawn < max(len(r.token_ids), 1),
            "`drawn` must leave a token of the prompt, in "
            f"[0, {len(r.token_ids)})",
            drawn=r.drawn,
            request=i,
        )
        need(
            r.first_sample is None
            or (is_int(r.first_sample) and r.first_sample >= 0),
            "`first_sample` must be an int of at least 0 or None",
            first_sample=r.first_sample,
            request=i,
        )
        check_ids(f"the prompt of request {i}", r.token_ids, vocabulary_size)
        wrong = [x for x in r.stop_token_ids if not 0 <= x < vocabulary_size]
        need(
            not wrong,
            "`stop_token_ids` must be ids of the model's vocabulary, in "
            f"[0, {vocabulary_size})",
            stop_token_ids=wrong,
            request=i,
        )
        check_fits(f"Request {i}", len(r.token_ids), r.max_tokens, max_length)
        if image_reader is not None:
            prompt = r.token_ids[: len(r.token_ids) - r.drawn]
            image_reader.check(prompt, r.images, f"request {i}")
    return requests


def _check_sampling(i, r):
    number = is_number(r.temperature)
    need(
        number and 0 <= r.temperature < float("inf"),
        "`temperature` must be 0 (greedy) or a finite positive number",
        temperature=r.temperature,
        request=i,
    )
    need(
        r.top_k is None or (is_int(r.top_k) and r.top_k >= 1),
        "`top_k` must be a positive int or None",
        top_k=r.top_k,
        request=i,
    )
    need(
        r.top_p is None or (is_number(r.top_p) and 0 < r.top_p <= 1),
        "`top_p` must be in (0, 1] or None",
        top_p=r.top_p,
        request=i,
    )
    need(
        r.min_p is None or (is_number(r.min_p) and 0 <= r.min_p <= 1),
        "`min_p` must be in [0, 1] or None",
        min_p=r.min_p,
        request=i,
    )


def check_ids(what, ids, vocabulary_size):
    if not ids:
        raise ValueError(
            f"A sequence must have a token: {what} is empty. Give it at "
            "least one, such as the tokenizer's begin-of-text token."
        )
    for column, x in enumerate(ids):
        if not 0 <= x < vocabulary_size:
            raise ValueError(
                f"Token ids must be in [0, {vocabulary_size}), the model's "
                f"vocabulary. Received: id {x} at place {column} of {what}"
            )


def check_fits(what, tokens, new_tokens, max_length):
    if max_length is None or tokens + new_tokens <= max_length:
        return
    asked = f" and max_tokens={new_tokens}" if new_tokens else ""
    raise ValueError(
        f"{what} does not fit the model's context of {max_length} tokens. "
        f"Received: {tokens} token ids{asked}, "
        f"{tokens + new_tokens} in all. Shorten it"
        + (" or lower `max_tokens`." if new_tokens else ".")
    )
