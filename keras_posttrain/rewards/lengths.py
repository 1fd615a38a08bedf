"""Rewards for the length of completions, and for repetition."""

import dataclasses
import math
import numbers

from keras_posttrain.rewards import reward
from keras_posttrain.rewards.reward import Reward
from keras_posttrain.workers.pool import Failure


class _TokenReward(Reward):
    """Base class for rewards that depend on a completion's tokens only."""

    @property
    def needs(self):
        return ("completion_ids",)

    def __call__(
        self, prompts=None, completions=None, *, completion_ids, **columns
    ):
        return [self.score(ids) for ids in completion_ids]


@dataclasses.dataclass(frozen=True)
class LengthReward(_TokenReward):
    """A reward of 1 for a completion with a length in a range, else 0.

    Args:
        minimum: int, the smallest number of tokens.
        maximum: int, the largest number of tokens, or `None`.

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
    """A penalty for completions close to the maximum length.

    The reward is 0 up to `max_completion_length - buffer` tokens, falls
    linearly to `max_penalty` at `max_completion_length`, and stays there. The
    paper uses 20480 tokens, a buffer of 4096 and a penalty of -1. As in the
    paper and in TRL, the length is in tokens and the penalty is bounded; in
    Tunix the length is in characters and the penalty unbounded.

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
        # Adding 0.0 turns -0.0 into 0.0.
        return self.max_penalty * min(max(share, 0.0), 1.0) + 0.0


@dataclasses.dataclass(frozen=True)
class RepetitionReward(_TokenReward):
    """A penalty for repeated n-grams of tokens.

    The reward is `max_penalty * (1 - distinct / total)` over the n-grams, and
    0 if there are fewer tokens than an n-gram has. The paper and TRL use words
    instead of tokens.

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
    """A cosine length reward: longer right answers get less, wrong ones more.

    The reward follows half a cosine from its value at 0 tokens to its value
    at `max_completion_length`, and is constant beyond it. Short right answers
    get the most, and of wrong answers the long ones. The paper uses 2 to 1
    and -10 to 0, and -10 beyond the length; the defaults are TRL's.

    Args:
        correct: reward function, not async. An answer is right if its reward
            is above 0; `None` gives `None` here as well.
        max_completion_length: int, tokens.
        right: pair of floats, the rewards of a right answer with 0 tokens and
            with `max_completion_length` tokens.
        wrong: pair of floats, the same for a wrong answer.

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
        scores = self.correct(**reward.arguments(self.correct).choose(values))
        return [
            right
            if right is None or isinstance(right, Failure)
            else self._score(right > 0, len(ids))
            for right, ids in zip(scores, completion_ids, strict=True)
        ]

    def _score(self, is_right, length):
        start, end = self.right if is_right else self.wrong
        share = min(length / self.max_completion_length, 1.0)
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def check_count(name, value, least):
    """Raises a `ValueError` unless a value is an int of at least `least`."""
    is_int = isinstance(value, numbers.Integral)
    if isinstance(value, bool) or not is_int or value < least:
        raise ValueError(
            f"`{name}` must be an int of at least {least}. Received: "
            f"{name}={value!r}."
        )


def check_penalty(value):
    """Raises a `ValueError` unless a value is finite and at most 0."""
    if not (math.isfinite(value) and value <= 0):
        raise ValueError(
            "`max_penalty` must be a finite number of at most 0. Received: "
            f"max_penalty={value!r}."
        )
