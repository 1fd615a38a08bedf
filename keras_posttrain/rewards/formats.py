"""Rewards for the form of a completion."""

import dataclasses
import re

from keras_posttrain.rewards.answers import check_pattern
from keras_posttrain.rewards.reward import Reward, completion_text


@dataclasses.dataclass(frozen=True)
class RegexReward(Reward):
    """1 for a completion that a regular expression matches, 0 for others.

    Args:
        pattern: string; `.` matches line ends too.
        full: bool, whether the whole completion must match; a match
            anywhere in it will do otherwise.

    Example:

    ```python
    reward = kpt.rewards.RegexReward(r"#### -?\\d+$")
    reward(["6 * 7?"], ["6 * 7 = 42\\n#### 42"])  # [1.0]
    ```
    """

    pattern: str
    full: bool = False

    def __post_init__(self):
        check_pattern("pattern", "" if self.pattern is None else self.pattern)
        if not self.pattern:
            raise ValueError(
                "`pattern` must be a regular expression. Received: "
                f"pattern={self.pattern!r}, which says nothing."
            )

    def __call__(self, prompts=None, completions=None, **columns):
        regex = re.compile(self.pattern, re.DOTALL)
        match = regex.fullmatch if self.full else regex.search
        return [
            float(match(completion_text(c)) is not None) for c in completions
        ]


@dataclasses.dataclass(frozen=True)
class ThinkFormatReward(Reward):
    """1 for a completion that thinks first, in `<think>` and `</think>`.

    The completion starts with `<think>`, which it has once, and ends the
    thoughts with `</think>`, as TRL's `think_format_reward` wants it.

    Args:
        answer: bool, whether the rest must be one `<answer>…</answer>`, with
            nothing but space around it.
        opened: bool, whether the chat template has written `<think>` at the
            end of the prompt, so that the completion starts within.

    Example:

    ```python
    reward = kpt.rewards.ThinkFormatReward()
    reward(["1 + 1?", "1 + 1?"], ["<think>Easy.</think>2", "2"])  # [1.0, 0.0]
    ```
    """

    answer: bool = False
    opened: bool = False

    def __call__(self, prompts=None, completions=None, **columns):
        return [float(self._fits(completion_text(c))) for c in completions]

    def _fits(self, text):
        text = "<think>" + text if self.opened else text
        thoughts, end, rest = text.partition("</think>")
        if not (text.startswith("<think>") and end):
            return False
        if text.count("<think>") != 1:
            return False
        if not self.answer:
            return True
        rest = rest.strip()
        return (
            rest.startswith("<answer>")
            and rest.endswith("</answer>")
            and text.count("<answer>") == text.count("</answer>") == 1
            and text.count("</think>") == 1
        )
