"""Rewards for the format of a completion."""

import dataclasses
import re
import warnings

from keras_posttrain.rewards.answers import check_pattern
from keras_posttrain.rewards.reward import Reward, completion_text


@dataclasses.dataclass(frozen=True)
class RegexReward(Reward):
    """A reward of 1 if a regular expression matches, 0 otherwise.

    Args:
        pattern: string, a regular expression; `.` also matches newlines.
        full: bool, whether the whole completion must match instead of any
            part of it.

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
                f"pattern={self.pattern!r}."
            )

    def __call__(self, prompts=None, completions=None, **columns):
        regex = re.compile(self.pattern, re.DOTALL)
        match = regex.fullmatch if self.full else regex.search
        return [
            float(match(completion_text(c)) is not None) for c in completions
        ]


@dataclasses.dataclass(frozen=True)
class ThinkFormatReward(Reward):
    """A reward of 1 for reasoning in `<think>` and `</think>`, else 0.

    The completion must start with `<think>`, contain it once, and contain
    `</think>`, as in TRL's `think_format_reward`.

    Args:
        answer: bool, whether the rest must be one `<answer>…</answer>`, with
            only whitespace around it.
        opened: bool, whether the chat template adds `<think>` to the end of
            the prompt, so that the completion starts inside it. A warning
            says so if completions look like that and it is false.

    Example:

    ```python
    reward = kpt.rewards.ThinkFormatReward()
    reward(["1 + 1?", "1 + 1?"], ["<think>Easy.</think>2", "2"])  # [1.0, 0.0]
    ```
    """

    answer: bool = False
    opened: bool = False

    def __call__(self, prompts=None, completions=None, **columns):
        texts = [completion_text(c) for c in completions]
        if not self.opened and _start_inside(texts):
            warnings.warn(
                "ThinkFormatReward: completions end their reasoning with "
                "`</think>` and none begins it, as with a chat template that "
                "adds `<think>` to the prompt. All get a reward of 0. Use "
                "ThinkFormatReward(opened=True). Received, for example: "
                f"{texts[0][:80]!r}",
                stacklevel=2,
            )
        return [float(self._fits(text)) for text in texts]

    def _fits(self, text):
        text = "<think>" + text if self.opened else text
        thoughts, end, rest = text.partition("</think>")
        starts = text.startswith("<think>") and text.count("<think>") == 1
        if not (starts and end):
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


def _start_inside(texts):
    """Returns whether most of several texts end thoughts that none begins."""
    ends = sum("</think>" in text for text in texts)
    begins = any("<think>" in text for text in texts)
    return len(texts) > 1 and 2 * ends > len(texts) and not begins
