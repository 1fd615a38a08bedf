"""What an episode may use."""

import dataclasses
import math
import numbers

AFTER_CUT = ("end", "continue")
LIMIT_REWARDS = ("keep", "zero", "at most zero")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an episode, for each of its players. `None` is no limit.

    A turn that reaches a limit of the model (`turns`, `tokens`, `context`)
    has `Reply.ended`; sampling after it ends the episode, which keeps the
    rewards of its turns. A limit of time is a fault of the infrastructure: the
    episode is run once more, then left out of the loss.

    Args:
        turns: int, the most sampled turns.
        tokens: int, the most sampled tokens.
        context: int, the most tokens of a segment; never more than the
            task's `sequence_length`. An episode that begins with more is an
            error, or left out if the task has `truncation="drop"`.
        tool_calls: int, the most calls of tools (`Tools`).
        tool_seconds: float, the time limit of a tool's call.
        seconds: float, the time limit of an episode.
        concurrency: int, the most episodes at once.
        retries: int, how often an episode that fails is run again.
        after_cut: `"end"`, or `"continue"`: what follows a turn that reached
            the most tokens of a turn. To continue, its end is put in, without
            loss.
        limit_reward: the reward of an episode that a limit ended: `"keep"`,
            `"zero"` or `"at most zero"`.

    Example:

    ```python
    limits = kpt.episodes.Limits(turns=4, limit_reward="zero")
    limits.reward(1.0)  # 0.0
    tools = kpt.episodes.Tools([kpt.episodes.python], limits=limits)
    task.compile(rewards=[correct], episode=tools)
    ```
    """

    turns: int | None = None
    tokens: int | None = None
    context: int | None = None
    tool_calls: int | None = None
    tool_seconds: float | None = 60.0
    seconds: float | None = None
    concurrency: int = 256
    retries: int = 1
    after_cut: str = "end"
    limit_reward: str = "keep"

    def __post_init__(self):
        for name in ("turns", "tokens", "context", "tool_calls"):
            self._check_int(name, 1, optional=True)
        self._check_int("concurrency", 1)
        self._check_int("retries", 0)
        for name in ("tool_seconds", "seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and value is not True
            if value is not None and not (
                is_number and 0 < value and math.isfinite(value)
            ):
                raise ValueError(
                    f"`{name}` must be a positive number of seconds, or "
                    f"None. Received: {name}={value!r}"
                )
        for name, known in (
            ("after_cut", AFTER_CUT),
            ("limit_reward", LIMIT_REWARDS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` must be one of {known}. "
                    f"Received: {name}={getattr(self, name)!r}"
                )

    def _check_int(self, name, least, optional=False):
        value = getattr(self, name)
        if optional and value is None:
            return
        is_int = isinstance(value, numbers.Integral)
        if not is_int or isinstance(value, bool) or value < least:
            raise ValueError(
                f"`{name}` must be an int of at least {least}"
                f"{' or None' if optional else ''}. "
                f"Received: {name}={value!r}"
            )

    def reward(self, reward):
        """Returns the reward of an episode that a limit ended."""
        if self.limit_reward == "keep":
            return reward
        return 0.0 if self.limit_reward == "zero" else min(reward, 0.0)
