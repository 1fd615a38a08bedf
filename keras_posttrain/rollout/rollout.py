"""The interface of rollout engines: token ids in, sampled tokens out.

What an engine reads of a task. `Rollout` needs `causal_lm` (for the size of
the vocabulary) and `max_length`. `NativeRollout` also reads `policy`,
`adapter`, `using_weights`, `trainable_variables` and
`non_trainable_variables`; `VLLMRollout` reads these and `sequence_length`.
The parts of both engines get these values and never the task.
"""

import contextlib
import dataclasses
import numbers
import operator
import reprlib
import threading

import keras
import numpy as np

from keras_posttrain.distribution import processes


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
    """

    token_ids: list
    per_token_logps: np.ndarray
    finish_reason: str
    weight_version: int
    token_versions: np.ndarray | None = None

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
    """

    per_token_logps: np.ndarray
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None


class Rollout(keras.callbacks.Callback):
    """A source of samples from the policy that a task trains.

    An engine is bound to a task like a Keras callback, by `set_model(task)`.
    It handles token ids, not text. A subclass implements `_generate`,
    `_score` and `sync_weights`, and `start` and `stop` if it has resources to
    release.

    If rollouts overlap with training (`overlaps`), one thread samples while
    another trains. `generate` must then sample from the weights of the last
    `sync_weights`, even if those of the task have changed, and end early if
    `is_interrupted`. If the engine fails it must set `needs_weights` and
    return the tokens sampled so far.

    Attributes:
        weight_version: int, the number of calls of `sync_weights`.
        overlaps: bool, set by a run before `start`.
        needs_weights: bool, whether the engine cannot sample before the next
            `sync_weights`.
        turn: lock that is held by each call of `generate` and `score`.
    """

    overlaps = needs_weights = False

    def __init__(self):
        super().__init__()
        self.weight_version = 0
        self.turn = threading.RLock()
        self._interruption = threading.Event()

    def start(self):
        """Starts the engine. Called when training begins."""

    def stop(self):
        """Releases the engine's resources. Called when training ends."""

    def on_train_begin(self, logs=None):
        self.start()

    def on_train_end(self, logs=None):
        self.stop()

    def generate(self, requests, *, on_tokens=None, progress=False):
        """Samples completions.

        Args:
            requests: list of `Request`s.
            on_tokens: `f(request, generation, token_ids)` or `None`, called
                during sampling with new tokens of a sample, in order. The
                first two arguments are the index of the request and that of
                the sample within it.
            progress: bool, whether to show a progress bar, or a function
                that is called with numbers of samples that are done.

        Returns:
            A list with, for each request, the list of its `Completion`s.

        Raises:
            ValueError: for an invalid request, named by its index, before
                anything is sampled.
        """
        self._need_task()
        requests = check_requests(
            requests, self._vocabulary_size(), self._max_length()
        )
        seeds = iter(_seeds(sum(r.seed is None for r in requests)))
        requests = [
            dataclasses.replace(r, seed=next(seeds)) if r.seed is None else r
            for r in requests
        ]
        with self.turn:
            return self._generate(requests, on_tokens, progress)

    def interrupt(self):
        """Makes calls of `generate` end early, also in another thread.

        Unfinished samples are returned with the finish reason
        `"interrupted"`. This lasts until `resume`.
        """
        self._interruption.set()

    def resume(self):
        """Allows `generate` to sample again."""
        self._interruption.clear()

    @property
    def is_interrupted(self):
        return self._interruption.is_set()

    def _interrupted(self):
        """Returns a function that says whether to end samples early.

        It is `None` if rollouts do not overlap with training.
        """
        return (lambda: self.is_interrupted) if self.overlaps else None

    def score(self, sequences, *, top_k=None, temperature=1.0):
        """Computes the log-probabilities of the tokens of sequences.

        Args:
            sequences: list of sequences of token ids.
            top_k: int or `None`, the number of most probable tokens to
                return at each position.
            temperature: float that divides the logits; 0 counts as 1.

        Returns:
            A list of `Scores`.
        """
        self._need_task()
        vocabulary = self._vocabulary_size()
        if top_k is not None:
            _need(
                _is_int(top_k) and 1 <= top_k <= vocabulary,
                f"`top_k` must be an int in [1, {vocabulary}]",
                top_k=top_k,
            )
        _need(
            _is_number(temperature) and 0 <= temperature < float("inf"),
            "`temperature` must be a finite number of at least 0",
            temperature=temperature,
        )
        sequences = [[operator.index(x) for x in s] for s in sequences]
        for i, ids in enumerate(sequences):
            _check_ids(f"sequence {i}", ids, vocabulary)
            _check_fits(f"Sequence {i}", len(ids), 0, self._max_length())
        with self.turn:
            return self._score(sequences, top_k, float(temperature or 1.0))

    def sync_weights(self):
        """Makes the engine sample from the current weights of the task.

        Returns:
            int, the new `weight_version`.
        """
        raise NotImplementedError

    def metrics(self):
        """Returns metrics to log with the run's, a dict of floats by name."""
        return {}

    def _generate(self, requests, on_tokens, progress):
        raise NotImplementedError

    def _score(self, sequences, top_k, temperature):
        raise NotImplementedError

    # Values read from the task

    def _need_task(self):
        if self.model is None:
            raise ValueError(
                f"This {type(self).__name__} has no model yet. Pass it to "
                "`compile(rollout=...)`, or call `set_model(task)`."
            )

    def _vocabulary_size(self):
        return self.model.causal_lm.backbone.vocabulary_size

    def _max_length(self):
        """Returns the most tokens of a sequence, or `None`."""
        return self.model.max_length

    def _task_weights(self):
        """Returns the task's current weights, `(trainable, frozen)`."""
        task = self.model
        return (
            [v.value for v in task.trainable_variables],
            [v.value for v in task.non_trainable_variables],
        )


def _seeds(number):
    """Returns random seeds, the same in all processes."""
    if not number:
        return []
    seeds = [np.random.randint(2**31) for _ in range(number)]
    return processes.from_first(seeds)


# --- Checks ------------------------------------------------------------------


def _is_int(x):
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_number(x):
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _need(holds, expected, **received):
    if not holds:
        (name, value), *where = received.items()
        where = "".join(f" of {k} {v}" for k, v in where)
        raise ValueError(f"{expected}. Received: {name}={value!r}{where}")


def check_requests(requests, vocabulary_size, max_length=None):
    """Checks requests and returns them as a list.

    A `ValueError` names the request, the field and its value. `max_length` is
    the most tokens of a sequence, or `None`.
    """
    if isinstance(requests, Request):
        raise ValueError(
            "`requests` must be a list of `Request`s. Received: one "
            "`Request`; put it in a list."
        )
    requests = list(requests)
    for i, r in enumerate(requests):
        _need(
            isinstance(r, Request),
            "`requests` must be a list of `kpt.rollout.Request`s",
            requests=type(r).__name__,
            item=i,
        )
        for name in ("num_generations", "max_tokens"):
            value = getattr(r, name)
            _need(
                _is_int(value) and value >= 1,
                f"`{name}` must be a positive int",
                **{name: value},
                request=i,
            )
        _check_sampling(i, r)
        if r.seed is not None:
            _need(_is_int(r.seed), "`seed` must be an int", seed=r.seed,
                  request=i)  # fmt: skip
        _need(
            _is_int(r.drawn) and 0 <= r.drawn < max(len(r.token_ids), 1),
            "`drawn` must leave a token of the prompt, in "
            f"[0, {len(r.token_ids)})",
            drawn=r.drawn,
            request=i,
        )
        _need(
            r.first_sample is None
            or (_is_int(r.first_sample) and r.first_sample >= 0),
            "`first_sample` must be an int of at least 0 or None",
            first_sample=r.first_sample,
            request=i,
        )
        _check_ids(f"the prompt of request {i}", r.token_ids, vocabulary_size)
        wrong = [x for x in r.stop_token_ids if not 0 <= x < vocabulary_size]
        _need(
            not wrong,
            "`stop_token_ids` must be ids of the model's vocabulary, in "
            f"[0, {vocabulary_size})",
            stop_token_ids=wrong,
            request=i,
        )
        _check_fits(f"Request {i}", len(r.token_ids), r.max_tokens, max_length)
    return requests


def _check_sampling(i, r):
    number = _is_number(r.temperature)
    _need(
        number and 0 <= r.temperature < float("inf"),
        "`temperature` must be 0 (greedy) or a finite positive number",
        temperature=r.temperature,
        request=i,
    )
    _need(
        r.top_k is None or (_is_int(r.top_k) and r.top_k >= 1),
        "`top_k` must be a positive int or None",
        top_k=r.top_k,
        request=i,
    )
    _need(
        r.top_p is None or (_is_number(r.top_p) and 0 < r.top_p <= 1),
        "`top_p` must be in (0, 1] or None",
        top_p=r.top_p,
        request=i,
    )
    _need(
        r.min_p is None or (_is_number(r.min_p) and 0 <= r.min_p <= 1),
        "`min_p` must be in [0, 1] or None",
        min_p=r.min_p,
        request=i,
    )


def _check_ids(what, ids, vocabulary_size):
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


def _check_fits(what, tokens, new_tokens, max_length):
    if max_length is None or tokens + new_tokens <= max_length:
        return
    asked = f" and max_tokens={new_tokens}" if new_tokens else ""
    raise ValueError(
        f"{what} does not fit the model's context of {max_length} tokens. "
        f"Received: {tokens} token ids{asked}, "
        f"{tokens + new_tokens} in all. Shorten it"
        + (" or lower `max_tokens`." if new_tokens else ".")
    )


def sample_counter(progress, requests):
    """Returns a function that counts samples that are done, or `None`.

    `progress` is that of `Rollout.generate`.
    """
    if not progress or callable(progress):
        return progress or None
    total = sum(r.num_generations for r in requests)
    return keras.utils.Progbar(total, unit_name="sample").add


@contextlib.contextmanager
def ready_engine(engine, model, running=False):
    """A scope in which an engine samples from a model's present weights.

    `running` says that a run keeps the engine ready already.
    """
    if running:
        yield
        return
    engine.set_model(model)
    engine.start()
    try:
        engine.sync_weights()
        yield
    finally:
        engine.stop()
