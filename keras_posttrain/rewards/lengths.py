"""Rewards for the length of a completion in tokens, and for repetition."""

import dataclasses
import math
import numbers

from keras_posttrain.rewards import reward
from keras_posttrain.rewards.reward import Reward


class _TokenReward(Reward):
    """A reward of the tokens of each completion alone."""

    @property
    def needs(self):
        return ("completion_ids",)

    def __call__(
        self, prompts=None, completions=None, *, completion_ids, **columns
    ):
        return [self.score(ids) for ids in completion_ids]


@dataclasses.dataclass(frozen=True)
class LengthReward(_TokenReward):
    """1 for a completion whose length is within bounds, 0 for others.

    Args:
        minimum: int, the fewest tokens.
        maximum: int, the most tokens, or `None`.

    Example:

    ```python
    reward = kpt.rewards.LengthReward(maximum=2)
    reward(completion_ids=[[5, 1], [5, 6, 1]])  # [1.0, 0.0]
    ```
    """

    minimum: int = 0
    maximum: int | None = None

    def __post_init__(self):
        check_count("minimum", self.minimum, 0)
        if self.maximum is not None:
            check_count("maximum", self.maximum, self.minimum)

    def score(self, ids):
        above = self.maximum is not None and len(ids) > self.maximum
        return float(len(ids) >= self.minimum and not above)


@dataclasses.dataclass(frozen=True)
class SoftOverlongReward(_TokenReward):
    """A penalty for completions close to the longest that there can be.

    0 up to `max_completion_length - buffer` tokens, from there linearly down
    to `max_penalty` at `max_completion_length`, and no lower beyond it. The
    paper has 20480 tokens, a buffer of 4096 and a penalty of -1. Lengths are
    tokens, and the penalty has a floor, as in the paper and in TRL; Tunix
    counts characters and goes on falling.

    Args:
        max_completion_length: int, tokens.
        buffer: int, tokens over which the penalty grows.
        max_penalty: float, at most 0.

    Reference:
        - [Yu et al., 2025](https://arxiv.org/abs/2503.14476), section 3.4.

    Example:

    ```python
    reward = kpt.rewards.SoftOverlongReward(4, 2)
    reward(completion_ids=[[5, 1], [5, 6, 1]])  # [0.0, -0.5]
    ```
    """

    max_completion_length: int
    buffer: int
    max_penalty: float = -1.0

    def __post_init__(self):
        check_count("max_completion_length", self.max_completion_length, 1)
        check_count("buffer", self.buffer, 1)
        check_penalty(self.max_penalty)
        if self.buffer > self.max_completion_length:
            raise ValueError(
                "`buffer` must not be above `max_completion_length`. "
                f"Received: buffer={self.buffer}, "
                f"max_completion_length={self.max_completion_length}."
            )

    def score(self, ids):
        start = self.max_completion_length - self.buffer
        share = (len(ids) - start) / self.buffer
        # Plus 0.0, which makes a 0 of minus 0.
        return self.max_penalty * min(max(share, 0.0), 1.0) + 0.0


@dataclasses.dataclass(frozen=True)
class RepetitionReward(_TokenReward):
    """A penalty for tokens that come again in the same order.

    `max_penalty * (1 - distinct / all)` over the n-grams of the tokens; 0
    for fewer tokens than an n-gram has. The paper has words where this has
    tokens, as TRL does.

    Args:
        ngram_size: int, tokens.
        max_penalty: float, at most 0.

    Reference:
        - [Yeo et al., 2025](https://arxiv.org/abs/2502.03373).

    Example:

    ```python
    reward = kpt.rewards.RepetitionReward(ngram_size=2)
    reward(completion_ids=[[5, 5, 5, 5, 5], [5, 6, 7]])  # [-0.75, 0.0]
    ```
    """

    ngram_size: int = 3
    max_penalty: float = -1.0

    def __post_init__(self):
        check_count("ngram_size", self.ngram_size, 1)
        check_penalty(self.max_penalty)

    def score(self, ids):
        ids = [int(i) for i in ids]
        shifted = (ids[i:] for i in range(self.ngram_size))
        ngrams = list(zip(*shifted))
        if not ngrams:
            return 0.0
        repeated = 1 - len(set(ngrams)) / len(ngrams)
        return self.max_penalty * repeated + 0.0


@dataclasses.dataclass(frozen=True)
class CosineLengthReward(Reward):
    """Makes right answers earn less, and wrong ones more, the longer they are.

    The reward goes along half a cosine from the value at 0 tokens to the one
    at `max_completion_length`, and stays there beyond it: short right answers
    earn most, and a wrong one is better long, having tried. The paper takes
    2 to 1 and -10 to 0, and -10 beyond the length; the defaults are TRL's.

    Args:
        correct: reward function that says what is right: a reward above 0 is,
            `None` is not judged here either. Not async.
        max_completion_length: int, tokens.
        right: pair of floats, the rewards of a right answer of no length and
            of the full length.
        wrong: pair of floats, those of a wrong one.

    Reference:
        - [Yeo et al., 2025](https://arxiv.org/abs/2502.03373).

    Example:

    ```python
    exact = kpt.rewards.ExactMatchReward()
    reward = kpt.rewards.CosineLengthReward(exact, 4)
    reward(["1 + 1?"], ["2"], answer=["2"], completion_ids=[[7, 1]])  # [0.75]
    ```
    """

    correct: object
    max_completion_length: int
    right: tuple = (1.0, 0.5)
    wrong: tuple = (-1.0, -0.5)

    def __post_init__(self):
        check_count("max_completion_length", self.max_completion_length, 1)
        reward.check_callable(self.correct, "`correct`")
        if reward.is_async(self.correct):
            raise ValueError(
                "`correct` must not be async. Received: "
                f"correct={self.correct!r}."
            )
        for name in ("right", "wrong"):
            pair = getattr(self, name)
            if len(pair) != 2 or not all(map(math.isfinite, pair)):
                raise ValueError(
                    f"`{name}` must be two finite numbers. Received: "
                    f"{name}={pair!r}."
                )

    @property
    def needs(self):
        inner = reward.arguments(self.correct).required
        return ("completion_ids", *(n for n in inner if n != "completion_ids"))

    def __call__(
        self, prompts=None, completions=None, *, completion_ids, **columns
    ):
        values = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        judged = self.correct(**reward.arguments(self.correct).choose(values))
        return [
            None if right is None else self._score(right > 0, len(ids))
            for right, ids in zip(judged, completion_ids, strict=True)
        ]

    def _score(self, is_right, length):
        start, end = self.right if is_right else self.wrong
        share = min(length / self.max_completion_length, 1.0)
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def check_count(name, value, least):
    """Raises a `ValueError` for what is no int of at least `least`."""
    is_int = isinstance(value, numbers.Integral)
    if isinstance(value, bool) or not is_int or value < least:
        raise ValueError(
            f"`{name}` must be an int of at least {least}. Received: "
            f"{name}={value!r}."
        )


def check_penalty(value):
    """Raises a `ValueError` for what is no finite number of at most 0."""
    if not (math.isfinite(value) and value <= 0):
        raise ValueError(
            "`max_penalty` must be a finite number of at most 0. Received: "
            f"max_penalty={value!r}."
        )
