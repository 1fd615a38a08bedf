"""The trajectories of a prompt, with their rewards."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Group:
    """The trajectories of one prompt, or of one player of a row.

    Attributes:
        trajectories: list of `kpt.episodes.Trajectory`s.
        texts: list of the rewards' inputs: strings or messages, or ids
            without a tokenizer.
        rewards: float array of shape `(trajectories, functions)`, NaN where
            a function gave no reward.
    """

    prompt: object
    trajectories: list
    texts: list
    rewards: np.ndarray


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
    found = [t for g in groups for t in g.trajectories if not t.failed]
    lengths = np.array([len(t) for t in found], int)
    ended = np.array([not t.was_cut for t in found], bool)
    if not found:
        return {}
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
