"""Token rewards, generalized advantages and the value loss of PPO."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.loss import Loss, check_types


def token_rewards(rewards, mask, segment_ids, kl=None, beta=0.0):
    """Computes the reward of each token: `-beta * kl`, plus the sequence's
    reward at its last token, or the token's own.

    The result is float32 whatever the types of the arguments are.

    Args:
        rewards: float array of shape `(rows, num_sequences)`. Those of
            sequences without a token in `mask` are ignored. Or one of the
            shape of `mask`: a reward for each token, such as those of turns
            at their last tokens; ignored outside `mask`.
        mask: float array of shape `(rows, length)`, not 0 for the tokens of
            the completions.
        segment_ids: int array of shape `(rows, length)`:
            `1 ... num_sequences` for the tokens of a sequence, 0 at padding.
        kl: float array of shape `(rows, length)`, an estimate of the KL
            divergence from the reference at each token, or `None`.
        beta: float, the weight of `kl`.

    Returns:
        A float32 array of shape `(rows, length)`, 0 outside `mask`.

    Example:

    ```python
    kpt.losses.token_rewards(
        np.array([[0.5]]), np.array([[0, 1, 1]]), np.array([[1, 1, 1]])
    )  # [[0, 0, 0.5]]
    ```
    """
    _check_shapes(mask=mask, segment_ids=segment_ids, kl=kl)
    if rewards.ndim != 2 or rewards.shape[0] != mask.shape[0]:
        raise ValueError(
            "`rewards` must have the shape (rows, num_sequences), or that of "
            f"`mask`. Received: rewards.shape={rewards.shape}, "
            f"mask.shape={mask.shape}."
        )
    mask = jnp.asarray(mask) != 0
    rewards = jnp.asarray(rewards).astype("float32")
    if rewards.shape == mask.shape:
        total = jnp.where(mask, rewards, 0.0)
    else:
        total = _at_last_tokens(rewards, mask, jnp.asarray(segment_ids))
    if kl is None:
        return total
    kl = jnp.asarray(kl).astype("float32")
    return total - jnp.where(mask, beta * kl, 0.0)


def _at_last_tokens(values, mask, segment_ids):
    """Puts the value of each sequence at its last token of `mask`."""
    places = jnp.arange(mask.shape[1])[None, :, None]
    ids = jnp.arange(1, values.shape[1] + 1)[None, None, :]
    member = mask[:, :, None] & (segment_ids[:, :, None] == ids)
    last = jnp.max(jnp.where(member, places, -1), axis=1)
    is_last = member & (places == last[:, None, :])
    return jnp.sum(jnp.where(is_last, values[:, None, :], 0.0), axis=2)


def generalized_advantages(
    rewards, values, mask, segment_ids=None, *, gamma=1.0, gae_lambda=0.95
):
    """Computes advantages and returns by generalized advantage estimation.

    `A_t = delta_t + gamma * gae_lambda * A_(t+1)` with
    `delta_t = reward_t + gamma * value_(t+1) - value_t`, and returns
    `A_t + value_t`. Tokens outside `mask`, such as a tool's text within a
    completion, are skipped: the next value is that of the next token in
    `mask`, without a discount for the tokens in between. Beyond the last
    token of a sequence values and advantages are 0. Advantages are not
    whitened; see `whiten`.

    Args:
        rewards: float array of shape `(rows, length)`, the reward for
            sampling each token; ignored outside `mask`.
        values: float array of shape `(rows, length)`, the expected return
            before each token was sampled, aligned with the tokens as
            `per_token_logps` is; ignored outside `mask`.
        mask: float array of shape `(rows, length)`, not 0 for tokens that
            the policy sampled.
        segment_ids: int array of shape `(rows, length)`, the sequence of the
            row that each token belongs to, or `None` for one per row.
        gamma: float, the discount per token.
        gae_lambda: float, 0 for one-step temporal differences, 1 for Monte
            Carlo returns.

    Returns:
        Tuple `(advantages, returns)` of float32 arrays of shape
        `(rows, length)`, 0 outside `mask`.

    Reference:
        - [Schulman et al., 2016](https://arxiv.org/abs/1506.02438). PPO for
          language models commonly uses `gamma=1.0` and `gae_lambda=0.95`.

    Example:

    ```python
    advantages, returns = kpt.losses.generalized_advantages(
        np.array([[0.0, 1.0]]),
        np.array([[0.5, 0.5]]),
        np.array([[1, 1]]),
        gae_lambda=1.0,
    )
    advantages, returns  # [[0.5, 0.5]], [[1.0, 1.0]]
    ```
    """
    _check_shapes(
        mask=mask, rewards=rewards, values=values, segment_ids=segment_ids
    )
    mask = jnp.asarray(mask) != 0
    if segment_ids is None:
        segment_ids = jnp.ones(mask.shape, "int32")
    zero = jnp.zeros((), "float32")
    rewards = jnp.where(mask, jnp.asarray(rewards).astype("float32"), zero)
    values = jnp.where(mask, jnp.asarray(values).astype("float32"), zero)

    def step(carry, token):
        next_value, next_advantage, next_segment = carry
        reward, value, is_sampled, segment = token
        # At the last token of a sequence nothing follows.
        follows = segment == next_segment
        next_value = jnp.where(follows, next_value, zero)
        next_advantage = jnp.where(follows, next_advantage, zero)
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        next_value = jnp.where(is_sampled, value, next_value)
        next_advantage = jnp.where(is_sampled, advantage, next_advantage)
        return (next_value, next_advantage, segment), next_advantage

    first = jnp.zeros(mask.shape[0], "float32")
    tokens = (rewards, values, mask, jnp.asarray(segment_ids))
    _, advantages = jax.lax.scan(
        step,
        (first, first, jnp.zeros(mask.shape[0], tokens[3].dtype)),
        jax.tree.map(jnp.transpose, tokens),
        reverse=True,
    )
    advantages = jnp.where(mask, advantages.T, zero)
    return advantages, jnp.where(mask, advantages + values, zero)


def whiten(values, mask, *, shift_mean=True, epsilon=1e-8):
    """Normalises values to mean 0 and variance 1 over the tokens of a mask.

    `(values - mean) / sqrt(variance + epsilon)` with the unbiased variance.
    Call it on the full batch, not on a micro-batch: the result depends on
    all tokens. A single token becomes 0.

    Args:
        values: float array of any shape, ignored outside `mask`.
        mask: float array of the same shape, not 0 where values count.
        shift_mean: bool, whether the mean becomes 0 or is kept.
        epsilon: float, added to the variance.

    Returns:
        A float32 array of the same shape, 0 outside `mask`.

    Example:

    ```python
    kpt.losses.whiten(np.array([1.0, 3.0, 9.0]), np.array([1, 1, 0]))
    # [-0.7071, 0.7071, 0]
    ```
    """
    if values.shape != mask.shape:
        raise ValueError(
            "`values` and `mask` must have the same shape. Received: "
            f"values.shape={values.shape}, mask.shape={mask.shape}."
        )
    mask = jnp.asarray(mask) != 0
    values = jnp.where(mask, jnp.asarray(values).astype("float32"), 0.0)
    count = jnp.sum(mask.astype("float32"))
    mean = reductions.ratio(jnp.sum(values), count)
    centered = jnp.where(mask, values - mean, 0.0)
    variance = jnp.sum(jnp.square(centered)) / jnp.maximum(count - 1.0, 1.0)
    white = centered * jax.lax.rsqrt(variance + epsilon)
    return white if shift_mean else jnp.where(mask, white + mean, 0.0)


def value_loss(values, old_values, returns, clip=0.2):
    """Computes PPO's clipped squared error of each value.

    `max((v - R)**2, (clamp(v) - R)**2) / 2` where `clamp(v)` is the value
    `v`, at most `clip` from the old value, and `R` the return.

    Args:
        values: float array of any shape, such as `(rows, length)`.
        old_values: float array of the same shape, the values that the
            advantages were computed with.
        returns: float array of the same shape, the targets.
        clip: float, the distance from the old value beyond which moving the
            value does not lower the loss, or `None` for no clipping.

    Returns:
        A float array of the same shape.

    Reference:
        - [Schulman et al., 2017](https://arxiv.org/abs/1707.06347), which
          has no clipping; the clip is that of OpenAI's PPO2.

    Example:

    ```python
    kpt.losses.value_loss(np.array([0.5]), np.array([0.0]), np.array([1.0]))
    # [0.32], (0.2 - 1)**2 / 2
    ```
    """
    error = jnp.square(values - returns)
    if clip is not None:
        near = jnp.clip(values, old_values - clip, old_values + clip)
        error = jnp.maximum(error, jnp.square(near - returns))
    return 0.5 * error


@dataclasses.dataclass(frozen=True)
class ValueLoss(Loss):
    """PPO's loss of a value head, the squared error of returns.

    `value_loss` of each token, averaged over the tokens of all completions.
    The paper itself has no clipping, `clip=None`.

    The batch holds `returns` and `old_values`, and `outputs` holds `values`,
    all of shape `(rows, length)`: the value before a token is at the
    position of the token. Without `old_values` the current values are used.

    Args:
        clip: float above 0, or `None` for no clipping.
        coefficient: float, the factor of the loss when it is added to that
            of the policy.

    Example:

    ```python
    loss = kpt.losses.ValueLoss(clip=0.2)
    batch = {
        "completion_mask": np.array([[0.0, 1.0]]),
        "returns": np.array([[0.0, 1.0]]),
        "old_values": np.array([[0.0, 0.0]]),
    }
    value, metrics = loss(batch, {"values": np.array([[0.0, 0.5]])})
    # value is (0.2 - 1)^2 / 2 = 0.32: the clipped error is the larger one
    ```
    """

    clip: float | None = 0.2
    coefficient: float = 1.0

    metric_names = (
        "value/loss",
        "value/clip_ratio",
        "value/mean",
        "value/return_mean",
    )

    def __post_init__(self):
        check_types(self)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                "`clip` must be above 0, or None for no clipping. Received: "
                f"clip={self.clip!r}."
            )
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise ValueError(
                "`coefficient` must be a finite number above 0. Received: "
                f"coefficient={self.coefficient!r}."
            )

    @property
    def needs(self):
        return ("values",)

    def logps_mask(self, batch):
        """Selects no tokens: the loss reads no log-probabilities."""
        return jnp.zeros(batch["completion_mask"].shape, bool)

    def normalizers(self, batch):
        return {"value": batch["completion_mask"].astype("float32").sum()}

    def total(self, batch, outputs):
        mask = batch["completion_mask"]

        def read(array):
            # NaN outside the mask must not reach a gradient.
            array = jnp.asarray(array).astype("float32")
            return jnp.where(mask != 0, array, 0.0)

        values = read(outputs["values"])
        returns = read(batch["returns"])
        if "old_values" in batch:
            old_values = read(batch["old_values"])
        else:
            old_values = jax.lax.stop_gradient(values)
        losses = value_loss(values, old_values, returns, self.clip)
        clipped = jnp.zeros_like(values)
        if self.clip is not None:
            free = value_loss(values, old_values, returns, None)
            clipped = (losses > free).astype("float32")
        total = reductions.token_sum(losses, mask)
        count = mask.astype("float32").sum()
        means = zip(self.metric_names[1:], (clipped, values, returns))
        metrics = {"value/loss": ("mean", total, count)}
        for name, array in means:
            metrics[name] = ("mean", reductions.token_sum(array, mask), count)
        return {"value": self.coefficient * total}, metrics


def _check_shapes(mask, **arrays):
    for name, array in arrays.items():
        if array is not None and (
            array.shape != mask.shape or array.ndim != 2
        ):
            raise ValueError(
                f"`{name}` and `mask` must have the shape (rows, length). "
                f"Received: {name}.shape={array.shape}, "
                f"mask.shape={mask.shape}."
            )
