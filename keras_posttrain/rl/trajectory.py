"""Trajectories sampled for prompts, and their rewards."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """The tokens that follow a prompt, in arrays of shape `(tokens,)`.

    A completion is a trajectory of one turn. Tokens that the policy did not
    sample, such as a tool's output, have mask 0.

    Attributes:
        token_ids: int32.
        mask: float32, the weight of each token in the loss.
        per_token_logps: float32, the engine's log-probabilities, or `None`
            where it reports none.
        token_versions: int, the version of the weights that sampled each.
        finish_reason: str, see `kpt.rollout.Completion`.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    per_token_logps: np.ndarray | None
    token_versions: np.ndarray
    finish_reason: str

    def __len__(self):
        return len(self.token_ids)


@dataclasses.dataclass
class Group:
    """The trajectories of one prompt.

    Attributes:
        texts: list of the rewards' inputs: strings or messages, or ids
            without a tokenizer.
        rewards: float array of shape `(trajectories, functions)`, NaN where
            a function gave no reward.
    """

    prompt: object
    trajectories: list
    texts: list
    rewards: np.ndarray


def from_completion(completion, mask_truncated=False):
    """Returns the trajectory of one `kpt.rollout.Completion`.

    With `mask_truncated` one that was cut by length carries no loss.
    """
    ids = np.array(completion.token_ids, np.int32)
    masked = mask_truncated and completion.finish_reason == "length"
    return Trajectory(
        token_ids=ids,
        mask=np.full(len(ids), 0.0 if masked else 1.0, np.float32),
        per_token_logps=completion.per_token_logps,
        token_versions=completion.token_versions,
        finish_reason=completion.finish_reason,
    )


# What `length_metrics` reports.
LENGTH_METRICS = (
    "completions/clipped_ratio",
    *(
        f"completions/{kind}_{name}"
        for name in ("length", "terminated_length")
        for kind in ("mean", "min", "max")
    ),
)


def length_metrics(groups):
    """Returns lengths of trajectories in tokens, under TRL's names."""
    trajectories = [t for g in groups for t in g.trajectories]
    lengths = np.array([len(t) for t in trajectories])
    ended = np.array([t.finish_reason != "length" for t in trajectories])
    metrics = {"completions/clipped_ratio": float(1 - ended.mean())}
    for name, values in (
        ("length", lengths),
        ("terminated_length", lengths[ended]),
    ):
        for kind in ("mean", "min", "max"):
            # 0 where nothing has ended, as in TRL.
            value = getattr(values, kind)() if len(values) else 0.0
            metrics[f"completions/{kind}_{name}"] = float(value)
    return metrics
