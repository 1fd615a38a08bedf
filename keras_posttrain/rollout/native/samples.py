"""The samples of a call of `generate`, and their sampling settings."""

import copy
import dataclasses
import functools

import numpy as np

from keras_posttrain.rollout.native.sampling import sample_keys
from keras_posttrain.rollout.request import Completion

# A `top_k` without effect.
NO_TOP_K = 2**31 - 1


def power_of_two(n, at_least=1):
    """Returns the least power of two that is at least `n`."""
    return max(1 << max(n - 1, 0).bit_length(), at_least)


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample of a request, with the tokens sampled so far.

    `request` is its request's index, `generation` its own index within that
    request, and `key` the result of `sample_key`.
    """

    request: int
    generation: int
    settings: object
    key: np.ndarray
    token_ids: list = dataclasses.field(default_factory=list)
    logps: list = dataclasses.field(default_factory=list)
    # The version of the weights that sampled each.
    versions: list = dataclasses.field(default_factory=list)
    # The experts of all tokens but the last, where they are recorded.
    routes: np.ndarray | None = None
    # Of a session, whose sample it is.
    turn: object = None
    # The reason that holds if the call ends before the sample does.
    finish_reason: str = "interrupted"

    @property
    def prompt(self):
        return self.settings.token_ids

    @property
    def end(self):
        """Tokens of the prompt and the longest completion."""
        return len(self.prompt) + self.settings.max_tokens

    @property
    def length(self):
        """Int, tokens so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def context(self):
        """Int32 array, the tokens so far."""
        return np.array([*self.prompt, *self.token_ids], np.int32)

    @property
    def images(self):
        """`Images` of the prompt, or `None`."""
        return self.settings.images

    @property
    def content(self):
        """Int32 array, `context` with the images' content in their places.

        Equal contents have equal keys and values.
        """
        found = self.context
        if self.images is not None:
            found[self.images.tokens] = self.images.token_keys
        return found

    @functools.cached_property
    def prompt_key(self):
        """Bytes that equal prompts have in common, images included.

        Tokens drawn before an interruption do not count as part of it.
        """
        drawn = self.settings.drawn
        return self.content[: len(self.prompt) - drawn].tobytes()

    def completion(self, version):
        """Returns the sample as a `Completion`.

        `version` is that of the weights, for a sample without a token.
        """
        return Completion(
            self.token_ids,
            np.array(self.logps, "float32"),
            self.finish_reason,
            self.versions[-1] if self.versions else version,
            np.array(self.versions, "int32"),
            self.routes if self.settings.return_routed_experts else None,
        )

    def finish(self, stopped):
        """Sets the reason why the sample ended."""
        self.finish_reason = "stop" if stopped else "length"


class Samples(list):
    """All samples of a call, in the order of their requests, which have seeds.

    `num_stop_ids` is the number of columns of the array of stop tokens;
    `truncated` says if a request sets `top_k`, `top_p` or `min_p`.
    """

    def __init__(self, requests):
        super().__init__(
            Sample(i, g, r, key)
            for i, (r, keys) in enumerate(zip(requests, sample_keys(requests)))
            for g, key in enumerate(keys)
        )
        self.num_requests = len(requests)
        self.num_stop_ids = power_of_two(
            max((len(r.stop_token_ids) for r in requests), default=0)
        )
        self.truncated = any(
            r.top_k or r.min_p or (r.top_p is not None and r.top_p < 1)
            for r in requests
        )

    def of_requests(self, requests):
        """Returns the `Samples` of some requests, a set of their indices."""
        found = copy.copy(self)
        found[:] = [s for s in self if s.request in requests]
        return found

    def by_request(self):
        """Returns a list of the samples of each request."""
        found = [[] for _ in range(self.num_requests)]
        for s in self:
            found[s.request].append(s)
        return found


def sampling_arrays(rows, num_stop_ids, truncated):
    """Returns the arrays by which rows of logits are sampled.

    They have a leading `rows` axis: `keys`, `temperature`, `stop` (-1 where
    unused), and, if any request truncates, `top_k`, `top_p` and `min_p`.

    Args:
        rows: list of the `Sample` of each row, or `None` for an idle row.
        num_stop_ids: int, the columns of `stop`.
        truncated: bool, whether a request may truncate.
    """
    count = len(rows)
    found = {
        "keys": np.zeros((count, 2), "uint32"),
        "temperature": np.ones(count, "float32"),
        "stop": np.full((count, num_stop_ids), -1, "int32"),
    }
    if truncated:
        found["top_k"] = np.full(count, NO_TOP_K, "int32")
        found["top_p"] = np.ones(count, "float32")
        found["min_p"] = np.zeros(count, "float32")
    for row, s in enumerate(rows):
        if s is None:
            continue
        r = s.settings
        found["keys"][row] = s.key
        found["temperature"][row] = r.temperature
        found["stop"][row, : len(r.stop_token_ids)] = r.stop_token_ids
        if truncated:
            found["top_k"][row] = min(r.top_k or NO_TOP_K, NO_TOP_K)
            found["top_p"][row] = 1.0 if r.top_p is None else r.top_p
            found["min_p"][row] = r.min_p or 0.0
    return found


def check_finite(request, logps):
    """Raises a `ValueError` if a log-probability is not finite."""
    if not np.all(np.isfinite(logps)):
        raise ValueError(
            f"The model returned NaN or infinity for a token of request "
            f"{request}: its weights or activations are not finite. Do not "
            "use these samples."
        )
