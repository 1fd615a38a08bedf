"""Losses of the routers of mixtures of experts."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.loss import check, check_types


class RoutingSums(typing.NamedTuple):
    """Sums over tokens of what the routers of a model computed.

    Attributes:
        counts: float32 array of shape `(layers, experts)`, the tokens that
            chose an expert. It has no gradient.
        probs: float32 array of shape `(layers, experts)`, the sum of the
            probabilities of an expert.
        squares: float32 array of shape `(layers,)`, the sum of the squared
            log of the routers' normalizers.
        tokens: float32 scalar, the number of tokens.
    """

    counts: jax.Array
    probs: jax.Array
    squares: jax.Array
    tokens: jax.Array

    def pooled(self):
        """Returns the sums as if all layers were one."""
        layers = len(self.counts)
        counts, probs, squares = (
            jnp.sum(x, axis=0, keepdims=True) for x in self[:3]
        )
        return RoutingSums(counts, probs, squares, self.tokens * layers)


def routing_sums(router_logits, experts, weights=None):
    """Sums up the routing of tokens.

    Args:
        router_logits: float array of shape `(..., tokens, num_experts)`.
        experts: int array of shape `(..., tokens, top_k)`, the choices.
        weights: float array of shape `(tokens,)`, how often each token
            counts; or `None` for once.

    Returns:
        A `RoutingSums`; leading axes are the layers.
    """
    *layers, tokens, count = router_logits.shape
    if weights is None:
        weights = jnp.ones(tokens, "float32")
    weights = jnp.asarray(weights).astype("float32")
    total = jnp.sum(weights)
    weights = jnp.broadcast_to(weights, (*layers, tokens))
    weight = weights[..., None]
    # NaN of padding must not reach a gradient.
    logits = jnp.where(weight != 0, router_logits.astype("float32"), 0.0)
    chosen = jax.nn.one_hot(experts, count, dtype="float32").sum(axis=-2)
    probs = jax.nn.softmax(logits, axis=-1)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return RoutingSums(
        counts=jnp.sum(weight * chosen, axis=-2),
        probs=jnp.sum(weight * probs, axis=-2),
        squares=jnp.sum(weights * squares, axis=-1),
        tokens=total,
    )


def _sums_of_logits(router_logits, mask, top_k=1):
    router_logits = jnp.asarray(router_logits)
    if router_logits.ndim == 2:
        router_logits = router_logits[None]
    _, experts = jax.lax.top_k(router_logits.astype("float32"), top_k)
    return routing_sums(router_logits, experts, mask)


def router_balance_loss(router_logits, top_k, mask=None, per_layer=True):
    """Computes the load-balancing loss of the Switch Transformer.

    `num_experts * sum_e f_e * p_e`, averaged over layers, where `f_e` is the
    number of tokens that chose expert `e` over the number of tokens, and
    `p_e` its mean probability. Only `p_e` has a gradient. The loss is `top_k`
    if all experts have the same share, and at most `num_experts`.

    Args:
        router_logits: float array of shape `(layers, tokens, num_experts)`,
            or `(tokens, num_experts)` of one layer.
        top_k: int, the experts of a token.
        mask: float array of shape `(tokens,)`, 0 for tokens that do not
            count, such as padding; or `None`.
        per_layer: bool. `False` computes `f_e` and `p_e` over the tokens of
            all layers together, as transformers does: then the surplus of an
            expert in one layer hides its lack in another.

    Returns:
        A float32 scalar.

    References:
        - [Fedus et al., 2021](https://arxiv.org/abs/2101.03961), equation 4,
          of one expert per token.

    Example:

    ```python
    # Both tokens prefer the first of two experts, by e to 1.
    logits = np.array([[1.0, 0.0], [1.0, 0.0]])
    kpt.losses.router_balance_loss(logits, top_k=1)  # 2 * e / (1 + e)
    ```
    """
    sums = _sums_of_logits(router_logits, mask, top_k)
    sums = sums if per_layer else sums.pooled()
    return _balance(sums.counts, sums.probs, sums.tokens)


def router_z_loss(router_logits, mask=None):
    """Computes the loss of the size of router logits.

    The mean of `logsumexp(router_logits)**2` over tokens and layers. It keeps
    logits small, so that rounding does not change the choice of experts.

    Args:
        router_logits, mask: as in `router_balance_loss`.

    Returns:
        A float32 scalar.

    References:
        - [Zoph et al., 2022](https://arxiv.org/abs/2202.08906), equation 5.
          The paper uses a weight of 0.001.

    Example:

    ```python
    logits = np.array([[0.0, 0.0], [0.0, 0.0]])
    kpt.losses.router_z_loss(logits)  # log(2)**2
    ```
    """
    sums = _sums_of_logits(router_logits, mask)
    return _mean_of_layers(sums.squares, sums.tokens)


@dataclasses.dataclass(frozen=True)
class RouterLoss:
    """What training adds to the loss of a mixture of experts.

    `compile(router_loss=...)` of every task takes one. The gradients reach
    the routers, where these are trained, and all layers before them.

    The shares of tokens are those of the full batch, over all devices and
    micro-batches, as Qwen3-MoE was trained: a micro-batch holds few
    sequences, and balance within each keeps experts from specializing. So
    the loss does not depend on how a batch is split, packed or padded; a
    shared prompt counts once for each of its sequences. With several
    micro-batches and `balance`, the shares take one more forward pass of the
    decoder.

    Args:
        balance: float, the weight of `router_balance_loss`. That of
            transformers (`router_aux_loss_coef`) is 0.001 for Mixtral and
            Qwen.
        z: float, the weight of `router_z_loss`.
        per_layer: bool, whether each layer is balanced. With `False` and
            without micro-batches the loss is that of transformers with
            `output_router_logits=True`, which pools all layers.

    References:
        - [Fedus et al., 2021](https://arxiv.org/abs/2101.03961).
        - [Qiu et al., 2025](https://arxiv.org/abs/2501.11873), the balance
          of the full batch.
        - [Zoph et al., 2022](https://arxiv.org/abs/2202.08906).

    Example:

    ```python
    task = kpt.SFTTask(mixtral)
    task.compile(router_loss=kpt.losses.RouterLoss(balance=0.001, z=0.001))
    ```
    """

    balance: float = 0.001
    z: float = 0.0
    per_layer: bool = True

    metric_names = (
        "router_balance_loss",
        "router_z_loss",
        "expert_load_max",
        "expert_unused_ratio",
    )

    def __post_init__(self):
        check_types(self)
        for name in ("balance", "z"):
            value = getattr(self, name)
            valid = math.isfinite(value) and value >= 0
            check(self, name, valid, "a finite number of at least 0")

    def total(self, sums, counts, tokens):
        """Computes the share of some rows in the loss of a batch.

        Args:
            sums: `RoutingSums` of the rows.
            counts: float array of shape `(layers, experts)`, the `counts` of
                the full batch.
            tokens: float scalar, the number of tokens of the full batch.

        Returns:
            `(loss, metrics)`: a float32 scalar, and a dict of metrics in the
            form that `reductions.metric_value` reads.
        """
        whole = sums._replace(counts=counts, tokens=tokens)
        own = sums
        if not self.per_layer:
            own, whole = own.pooled(), whole.pooled()
        loss = jnp.zeros((), "float32")
        if self.balance:
            loss += self.balance * _balance(
                whole.counts, whole.probs, whole.tokens
            )
        if self.z:
            loss += self.z * _mean_of_layers(whole.squares, whole.tokens)
        values = (
            (_balance, own.counts, own.probs, own.tokens),
            (_mean_of_layers, own.squares, own.tokens),
            (_load_max, sums.counts),
            (_unused_ratio, sums.counts),
        )
        return loss, dict(zip(self.metric_names, values))


def _balance(counts, probs, tokens):
    shares = reductions.ratio(counts, tokens)
    means = reductions.ratio(probs, tokens)
    return counts.shape[-1] * jnp.mean(jnp.sum(shares * means, axis=-1))


def _mean_of_layers(sums, tokens):
    return reductions.ratio(jnp.mean(sums), tokens)


def _load_max(counts):
    """Returns the highest load of an expert over the mean of its layer."""
    return jnp.max(
        reductions.ratio(jnp.max(counts, axis=-1), jnp.mean(counts, axis=-1))
    )


def _unused_ratio(counts):
    """Returns the share of experts that no token chose."""
    return jnp.mean((counts == 0).astype("float32"))
