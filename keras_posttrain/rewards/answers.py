"""Rewards that compare completions with the answers in a column."""

import dataclasses
import functools
import importlib.util
import math
import numbers
import re

from keras_posttrain.rewards import formulas
from keras_posttrain.rewards.formulas import last_match
from keras_posttrain.rewards.reward import Reward, completion_text
from keras_posttrain.workers.pool import Failure, Workers

# Memory that a process may use to compare formulas.
FORMULA_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class _AnswerReward(Reward):
    """Base class for rewards of 1 for a correct answer and 0 for others."""

    column: str = "answer"
    extract: str | None = None

    def __post_init__(self):
        check_pattern("extract", self.extract)

    @property
    def needs(self):
        return ("completions", self.column)

    def __call__(self, prompts=None, completions=None, **columns):
        answers = columns[self.column]
        return [
            None
            if _is_missing(answer)
            else self.compare(last_match(self.extract, text), answer)
            for text, answer in zip(
                map(completion_text, completions), answers, strict=True
            )
        ]

    def compare(self, text, answer):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ExactMatchReward(_AnswerReward):
    """A reward of 1 for a completion equal to the answer, 0 for others.

    Whitespace at both ends is ignored. `None` if the row has no answer.

    Args:
        column: string, the column of the answers: strings, numbers, or lists
            of accepted answers. A float such as 42.0, to which tables with
            missing values turn 42, accepts `"42"` as well.
        extract: string, a regular expression whose last match in the
            completion is its answer (its first group, if it has one), or
            `None` for the whole text. `.` also matches newlines. Without a
            match the reward is 0.
        ignore_case: bool, whether to ignore upper and lower case.

    Example:

    ```python
    reward = kpt.rewards.ExactMatchReward(extract=r"Answer: (\\S+)")
    reward(["1 + 1?"], ["Let me see. Answer: 2"], answer=["2"])  # [1.0]
    ```
    """

    ignore_case: bool = False

    def compare(self, text, answer):
        several = isinstance(answer, (list, tuple, set))
        accepted = list(answer) if several else [answer]
        accepted += [
            int(a) for a in accepted if isinstance(a, float) and a.is_integer()
        ]
        return float(
            text is not None
            and any(self._plain(text) == self._plain(a) for a in accepted)
        )

    def _plain(self, value):
        text = str(value).strip()
        return text.casefold() if self.ignore_case else text


# Thousands with commas, decimals, powers of ten and simple fractions. A
# hyphen after a word, a digit or a bracket is not a minus sign.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w).])(?P<sign>[-+][^\S\n]?)?[$€£]?(?P<top>(?:{_DIGITS})"
    rf"(?:[eE][-+]?\d+)?)(?:\s?/\s?(?P<bottom>{_DIGITS}))?"
    rf"|(?P<plain>(?:{_DIGITS})(?:[eE][-+]?\d+)?)"
)
# What begins an item of a list is no sign.
_ITEM = re.compile(r"\n[^\S\n]*[-+][^\S\n]+")


def last_number(text):
    """Parses the last number in a text.

    Args:
        text: string. `"1,234.5"`, `"-3"`, `"$5"`, `"2e-3"` and `"1/2"` are
            numbers; the hyphen of `"17-25"` is not a minus sign, nor is that
            of a line such as `"- 42"` in a list.

    Returns:
        Float, or `None` if there is no number or it is not finite.
    """
    top, bottom = last_fraction(text)
    if top is None or bottom == 0:
        return None
    number = top if bottom is None else top / bottom
    return number if math.isfinite(number) else None


def last_fraction(text):
    """Parses the last number in a text as `last_number`, in its two parts.

    Returns:
        `(top, bottom)`, floats; `bottom` is `None` for a number without a
        slash, and both are if there is no number.
    """
    text = _ITEM.sub("\n", str(text).replace("\u2212", "-"))
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None, None
    match = matches[-1]
    top = _read(match["plain"] or match["top"])
    if (match["sign"] or "").startswith("-"):
        top = -top
    return top, _read(match["bottom"]) if match["bottom"] else None


def _read(digits):
    return float(digits.replace(",", ""))


@dataclasses.dataclass(frozen=True)
class NumericReward(_AnswerReward):
    """A reward of 1 if a completion's last number is the answer, else 0.

    `None` if the row has no answer or its answer contains no number. GSM8K's
    answers, whose last number follows `####`, need no preparation. Numbers
    are compared in double precision: `|x - answer| <= tolerance +
    relative_tolerance * |answer|`.

    Args:
        column: string, the column of the answers: numbers, or strings, of
            which the last number is used.
        extract: string, a regular expression whose last match contains the
            number (its first group, if it has one), or `None` for the whole
            text. `.` also matches newlines. Without a match the reward is 0.
        tolerance: float, the largest absolute difference.
        relative_tolerance: float, the largest difference relative to the
            answer.

    Example:

    ```python
    reward = kpt.rewards.NumericReward(tolerance=0.01)
    reward(["2/3?"], ["It is about 0.667."], answer=["0.6667"])  # [1.0]
    ```
    """

    tolerance: float = 1e-6
    relative_tolerance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("tolerance", "relative_tolerance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"`{name}` must be a finite number of at least 0. "
                    f"Received: {name}={value!r}."
                )

    def compare(self, text, answer):
        expected = last_number(answer)
        if expected is None:
            return None
        number = None if text is None else last_number(text)
        if number is None:
            return 0.0
        limit = self.tolerance + self.relative_tolerance * abs(expected)
        return float(abs(number - expected) <= limit)


@dataclasses.dataclass(frozen=True)
class MathReward(_AnswerReward):
    r"""A reward of 1 for a formula equal to the answer, 0 for others.

    `\frac{1}{2}`, `0.5` and `1/2` are equal, and so are `x + 1` and `1 + x`.
    This needs the package `math-verify`: `pip install keras_posttrain[math]`.
    `None` if the row has no answer or its answer cannot be parsed.

    Formulas are compared in processes of their own, so that one that takes
    too long or too much memory, such as `9^{9^{9^{9}}}`, cannot hold up the
    run: it gets 0.

    Args:
        column: string, the column of the answers: strings such as
            `"\\frac{1}{2}"`, with or without `$`, or numbers.
        extract: string, a regular expression whose last match holds the
            formula (its first group, if it has one), or `None` for the whole
            text. `.` also matches newlines. Without a match the reward is 0.
        timeout: float, the seconds within which a completion must be
            compared.

    Example:

    ```python
    reward = kpt.rewards.MathReward()
    reward(["?"], [r"So it is $\frac{2}{4}$."], answer=["1/2"])  # [1.0]
    ```
    """

    timeout: float = 5.0

    def __post_init__(self):
        super().__post_init__()
        check_seconds("timeout", self.timeout)
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "`MathReward` needs the package math-verify. Install it: "
                "`pip install math-verify`."
            )

    def __call__(self, prompts=None, completions=None, **columns):
        rewards = [None] * len(completions)
        calls = {
            i: {
                "text": completion_text(completion),
                "answer": str(answer),
                "extract": self.extract,
            }
            for i, (completion, answer) in enumerate(
                zip(completions, columns[self.column], strict=True)
            )
            if not _is_missing(answer)
        }
        results = _graders(self.timeout).map(calls.values())
        for i, result in zip(calls, results):
            rewards[i] = 0.0 if isinstance(result, Failure) else result
        return rewards


@functools.cache
def _graders(timeout):
    """Returns the processes that compare formulas."""
    return Workers((formulas.__file__, "grader"), timeout, FORMULA_BYTES)


def _is_missing(answer):
    """Returns whether a row has no answer: NaN where a table has a gap."""
    return answer is None or (isinstance(answer, float) and math.isnan(answer))


def check_pattern(name, pattern):
    """Raises a `ValueError` if a value is not a regular expression."""
    if pattern is None:
        return
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{name}` must be a regular expression. Received: "
            f"{name}={pattern!r} ({error})."
        ) from None


def check_seconds(name, value):
    """Raises a `ValueError` if a value is not a time limit in seconds."""
    is_number = isinstance(value, numbers.Real) and value is not True
    if not (is_number and 0 < value < math.inf):
        raise ValueError(
            f"`{name}` must be a number of seconds above 0. Received: "
            f"{name}={value!r}."
        )
