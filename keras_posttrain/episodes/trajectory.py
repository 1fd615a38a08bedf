"""What an episode leaves behind: tokens as they were sampled, with rewards."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The tokens that an engine was given and gave, in order.

    All arrays have the shape `(tokens,)`.

    Attributes:
        token_ids: int32.
        mask: float32, the weight of each token in the loss: 0 for what the
            policy did not sample here.
        per_token_logps: float32, the engine's log-probabilities, NaN where it
            reported none and 0 for what was not sampled.
        token_versions: int32, the version of the weights that sampled each
            token, -1 for what was not sampled.
        turns: int32, the turn of the trajectory in which each was sampled, -1
            for what was not sampled.
        routed_experts: int16 array of shape `(tokens - 1, mixtures, top_k)`,
            as of `kpt.rollout.Completion`, or `None`.

    Example:

    ```python
    segment = kpt.episodes.Segment(
        token_ids=np.array([5, 6, 7]),
        mask=np.array([0.0, 1.0, 1.0]),
        per_token_logps=np.array([0.0, -1.0, -0.5]),
        token_versions=np.array([-1, 3, 3]),
        turns=np.array([-1, 0, 0]),
    )
    segment.without_loss().mask  # [0.0, 0.0, 0.0]
    ```
    """

    token_ids: np.ndarray
    mask: np.ndarray
    per_token_logps: np.ndarray
    token_versions: np.ndarray
    turns: np.ndarray
    routed_experts: np.ndarray | None = None

    def without_loss(self):
        """Returns a copy whose mask is 0."""
        return dataclasses.replace(self, mask=np.zeros_like(self.mask))


@dataclasses.dataclass(eq=False)
class Trajectory:
    """All that one player said and was told in an episode.

    Attributes:
        segments: list of `Segment`s: one, and one more for each context that
            was begun anew or branched off. Each sampled token is in one of
            them with its mask.
        ended: string, why it ended: `"done"`, a limit of `Limits`
            (`"turns"`, `"tokens"`, `"context"`, `"length"`), `"error"` for a
            fault of the infrastructure; of a completion its finish reason.
        turn_rewards: list of floats, what each turn earned. The reward of the
            whole episode is added to the last.
        messages: list of dicts, the conversation.
        row: int, index of the dataset row.
        player: string.
        reward: float, what the episode returned and its turns earned, or
            `None` where it has no reward of its own.
        counts: dict of floats, such as the calls of tools.
        error: string, of a failed episode.

    Example:

    ```python
    segment = kpt.episodes.Segment(
        token_ids=np.array([5, 6, 7]),
        mask=np.array([0.0, 1.0, 1.0]),
        per_token_logps=np.array([0.0, -1.0, -0.5]),
        token_versions=np.array([-1, 3, 3]),
        turns=np.array([-1, 0, 0]),
    )
    trajectory = kpt.episodes.Trajectory([segment], ended="done", reward=1.0)
    trajectory.sampled_ids  # [6, 7]
    ```
    """

    segments: list
    ended: str
    turn_rewards: list = dataclasses.field(default_factory=list)
    messages: list = dataclasses.field(default_factory=list)
    row: int = 0
    player: str = ""
    reward: float | None = None
    counts: dict = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def failed(self):
        """Bool, whether it is left out of the loss and of the baseline."""
        return self.error is not None

    @property
    def was_cut(self):
        """Bool, whether a limit of tokens ended it."""
        return self.ended in ("length", "tokens", "context")

    def __len__(self):
        """Returns the number of sampled tokens."""
        return sum(int((s.turns >= 0).sum()) for s in self.segments)

    @property
    def sampled_ids(self):
        """List of ints, the sampled tokens."""
        return [
            int(x) for s in self.segments for x in s.token_ids[s.turns >= 0]
        ]

    @property
    def versions(self):
        """Int array, the version of the weights that sampled each token."""
        parts = [s.token_versions[s.turns >= 0] for s in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def of_completion(prompt_ids, completion, row=0, mask_truncated=False):
    """Returns the trajectory of one `kpt.rollout.Completion` of a prompt.

    With `mask_truncated` one that was cut by length carries no loss.
    """
    before, count = len(prompt_ids), len(completion.token_ids)
    masked = mask_truncated and completion.finish_reason == "length"
    logps = completion.per_token_logps
    if logps is None:
        logps = np.full(count, np.nan)

    def array(fill, values, dtype):
        filled = np.full(before, fill, dtype)
        return np.concatenate([filled, np.asarray(values, dtype)])

    segment = Segment(
        np.array([*prompt_ids, *completion.token_ids], np.int32),
        array(0, np.full(count, 0.0 if masked else 1.0), np.float32),
        array(0, logps, np.float32),
        array(-1, completion.token_versions, np.int32),
        array(-1, np.zeros(count), np.int32),
        completion.routed_experts,
    )
    return Trajectory([segment], completion.finish_reason, [0.0], row=row)
