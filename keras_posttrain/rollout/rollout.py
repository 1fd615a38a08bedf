"""The interface of rollout engines: token ids in, sampled tokens out.

What an engine reads of a task. `Rollout` needs `causal_lm` (for the size of
the vocabulary), `max_length`, and with a vision tower `tokenizer` (for the
tokens of images). `NativeRollout` also reads `policy`, `adapter`,
`using_weights`, `trainable_variables` and `non_trainable_variables`;
`VLLMRollout` reads these and `sequence_length`.
The parts of both engines get these values and never the task.
"""

import contextlib
import dataclasses
import operator
import threading

import keras
import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.models.vision import image_reader, tower_of
from keras_posttrain.rollout.request import (
    check_fits,
    check_ids,
    check_requests,
    is_int,
    is_number,
    need,
)
from keras_posttrain.rollout.session import Session


def need_routed_experts(engine, policy):
    """Raises a `ValueError` where no experts of tokens can be reported."""
    if not (engine.returns_routed_experts and policy.has_experts):
        name = type(policy.backbone).__name__
        raise ValueError(
            "The experts that tokens choose are reported by "
            "`kpt.rollout.NativeRollout` alone, of a mixture of experts "
            "whose layers run one by one, such as Mixtral, Qwen3-MoE or "
            "gpt-oss. Leave out `routing_replay` (of requests, "
            f"`return_routed_experts`). Received: {type(engine).__name__} "
            f"for a {name}"
        )


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a run is going to ask of an engine.

    Attributes:
        rollouts: int, how many, or `None` where that is not known.
        prompts, samples: ints, of a rollout.
        prompt_lengths: ints, the fewest and the most tokens of a prompt.
    """

    rollouts: int | None
    prompts: int
    samples: int
    prompt_lengths: tuple

    def part(self, count):
        """Returns what is asked of each of `count` parts of an engine."""
        prompts = -(-self.prompts // count)
        samples = prompts * -(-self.samples // self.prompts)
        samples = min(samples, self.samples)
        return dataclasses.replace(self, prompts=prompts, samples=samples)


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
        returns_routed_experts: bool, whether completions of mixtures can have
            the experts of their tokens.
        is_apart: bool, whether it samples without devices that the trainer
            uses: in several processes rollouts can then overlap with training.
        uses_devices: bool, whether it samples by programs on JAX's devices.
        takes_images: bool, whether prompts may have images.
        compile_ahead: bool or `"auto"`, whether a run compiles the programs
            of all lengths after its second rollout; `"auto"` for runs of 200
            rollouts and more, and on streams after 20.

    Example:

    ```python
    class Silence(kpt.rollout.Rollout):  # ends each sample at once
        def sync_weights(self):
            self.weight_version += 1
            return self.weight_version

        def _generate(self, requests, on_tokens, progress):
            end = task.tokenizer.eos_token_id
            sample = kpt.rollout.Completion(
                [end], np.zeros(1, "float32"), "stop", self.weight_version
            )
            return [[sample] * r.num_generations for r in requests]

    engine = Silence()
    engine.set_model(task)
    [[completion]] = engine.generate([kpt.rollout.Request(ids)])
    completion.finish_reason  # "stop"
    ```
    """

    overlaps = needs_weights = returns_routed_experts = False
    takes_images = is_apart = uses_devices = False
    compile_ahead = "auto"

    def __init__(self):
        super().__init__()
        self.weight_version = 0
        self.turn = threading.RLock()
        self._interruption = threading.Event()

    def start(self):
        """Starts the engine. Called when training begins."""

    def expect(self, expected):
        """Takes an `Expected` of a run, before its first rollout."""

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
                that is called with numbers of samples that are done, by one
                thread at a time, which need not be the caller's.

        Returns:
            A list with, for each request, the list of its `Completion`s.

        Raises:
            ValueError: for an invalid request, named by its index, before
                anything is sampled.
        """
        requests = self.checked(requests)
        seeds = iter(_seeds(sum(r.seed is None for r in requests)))
        requests = [
            dataclasses.replace(r, seed=next(seeds)) if r.seed is None else r
            for r in requests
        ]
        with self.turn:
            return self._generate(requests, on_tokens, progress)

    def session(self):
        """Opens a `kpt.rollout.Session` for conversations of several turns.

        Use it as a context manager.
        """
        return Session(self)

    def scope(self):
        """A scope for threads that sample while another one trains.

        In it Keras's distribution is that of the engine, and processes
        exchange arrays without devices that the trainer uses.
        """
        return contextlib.nullcontext()

    def checked(self, requests):
        """Returns requests as a list; a `ValueError` names an invalid one."""
        self._need_task()
        reader = self._image_reader()
        requests = check_requests(
            requests, self._vocabulary_size(), self._max_length(), reader
        )
        for i, r in enumerate(requests):
            if r.images is not None and not (self.takes_images and reader):
                raise _no_images(self, reader, i)
        if any(r.return_routed_experts for r in requests):
            need_routed_experts(self, self.model.policy)
        return requests

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
            need(
                is_int(top_k) and 1 <= top_k <= vocabulary,
                f"`top_k` must be an int in [1, {vocabulary}]",
                top_k=top_k,
            )
        need(
            is_number(temperature) and 0 <= temperature < float("inf"),
            "`temperature` must be a finite number of at least 0",
            temperature=temperature,
        )
        sequences = [[operator.index(x) for x in s] for s in sequences]
        reader = self._image_reader()
        for i, ids in enumerate(sequences):
            check_ids(f"sequence {i}", ids, vocabulary)
            check_fits(f"Sequence {i}", len(ids), 0, self.score_length)
            if reader is not None and reader.count(ids):
                raise ValueError(
                    "`score` reads no images. Received: sequence "
                    f"{i} with the tokens of {reader.count(ids)} images. Use "
                    "`task.log_probs(rows)`, whose rows have images."
                )
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

    @property
    def context_length(self):
        """Int or `None`, the most tokens of a prompt and its sample."""
        self._need_task()
        return self._max_length()

    @property
    def score_length(self):
        """Int or `None`, the most tokens of a sequence that is scored."""
        return self.context_length

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

    def _image_reader(self):
        """Returns the model's `ImageReader`, or `None` without a tower."""
        if tower_of(self.model.causal_lm.backbone) is None:
            return None
        return image_reader(self.model.causal_lm, self.model.tokenizer)

    def _task_weights(self):
        """Returns the task's current weights, `(trainable, frozen)`."""
        task = self.model
        return (
            [v.value for v in task.trainable_variables],
            [v.value for v in task.non_trainable_variables],
        )


def _no_images(engine, reader, request):
    tower = "" if reader else " without a vision tower"
    return ValueError(
        "Images are read by `kpt.rollout.NativeRollout` alone, of a Gemma 3 "
        "or 4 that was loaded with `vision=True`. Received: request "
        f"{request} with images, for {type(engine).__name__} of a "
        f"{type(engine.model.causal_lm).__name__}{tower}."
    )


def _seeds(number):
    """Returns random seeds, the same in all processes."""
    if not number:
        return []
    seeds = [np.random.randint(2**31) for _ in range(number)]
    return processes.from_first(seeds)


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
