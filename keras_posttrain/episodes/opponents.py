"""Who plays in place of the policy."""

import dataclasses
import numbers


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An opponent: a copy of the policy as it was some rollouts ago.

    In self-play a policy may come to beat only itself. A copy that stays for
    a while holds against that. Under LoRA only the adapter is copied.

    The copy has one seat, and the policy learns the others. To learn both
    seats of a game, name the players by who learns, not by their marks, and
    let a column of the rows say who begins (`guides/self_play.py`).

    Args:
        every: int, the rollouts after which a new copy is made.
        share: float above 0, at most 1, the share of episodes in which the
            copy plays; in the others it is the policy itself, which is not
            trained in this seat either.

    Example:

    ```python
    async def duel(first, second):
        mine = await first("Say a number.")
        other = await second("Say a number.")
        return {first: float(mine.text > other.text)}

    frozen = kpt.episodes.Frozen(every=20)
    task.compile(
        episode=kpt.episodes.Episode(duel, opponents={"second": frozen}),
        num_generations=4,
    )
    ```
    """

    every: int = 20
    share: float = 1.0

    def __post_init__(self):
        is_int = isinstance(self.every, numbers.Integral)
        if not is_int or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(
                "`every` must be a positive int, in rollouts. "
                f"Received: every={self.every!r}"
            )
        is_number = isinstance(self.share, numbers.Real)
        if not is_number or not 0 < self.share <= 1:
            raise ValueError(
                "`share` must be a number above 0 and at most 1. "
                f"Received: share={self.share!r}"
            )
