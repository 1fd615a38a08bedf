"""Mixtures of experts: each expert computes only the tokens that chose it.

KerasHub's layers compute all experts for every token and multiply most of the
results by 0. Here the choices of the tokens are sorted by expert, and a
product of sorted rows with the experts' kernels computes no others. No expert
has a limit on its tokens, so that none is dropped.
"""

import contextlib
import contextvars
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from keras_posttrain.losses.router import routing_sums
from keras_posttrain.models import sharding
from keras_posttrain.models.grouped_matmul import (
    add_bias,
    block_size,
    combine,
    dispatch,
    grouped_matmul,
    sort_by_expert,
)

_USED_TOKENS = contextvars.ContextVar("used_tokens", default=None)
# The weights of tokens, and the list of the layers' `RoutingSums`.
_ROUTING = contextvars.ContextVar("routing", default=(None, []))


@contextlib.contextmanager
def used_tokens(mask):
    """Makes experts inside compute only some tokens.

    Args:
        mask: bool array; flattened, an element for each token that the
            layers are called with. The others, such as padding, get 0.
    """
    token = _USED_TOKENS.set(mask.reshape(-1))
    try:
        yield
    finally:
        _USED_TOKENS.reset(token)


@contextlib.contextmanager
def recorded_routing(weights):
    """Records the routing of each mixture that is called inside.

    Args:
        weights: float array, how often each token counts, as in
            `used_tokens`; or `None` to record nothing.

    Yields:
        A list of the layers' `RoutingSums`, filled by the calls.
    """
    layers = []
    token = _ROUTING.set((weights, layers))
    try:
        yield layers
    finally:
        _ROUTING.reset(token)


@contextlib.contextmanager
def routing_of_layer():
    """Records what is called inside apart from the scope around it.

    A transformation such as `jax.checkpoint` has to return what is computed
    in it. The list that is yielded is for `add_routing` outside.
    """
    with recorded_routing(_ROUTING.get()[0]) as layers:
        yield layers


def add_routing(layers):
    """Adds a list of `RoutingSums` to those of the scope around."""
    _ROUTING.get()[1].extend(layers)


def choose_experts(logits, top_k, normalize):
    """Chooses the experts of each token, in float32.

    Args:
        logits: float array of shape `(tokens, experts)`.
        top_k: int, the experts of a token.
        normalize: bool, whether a token's weights add up to 1. If not, they
            are the probabilities among all experts.

    Returns:
        `(weights, experts)`: a float32 and an int32 array of shape
        `(tokens, top_k)`, best first.
    """
    probs = jax.nn.softmax(logits.astype("float32"), axis=-1)
    weights, experts = jax.lax.top_k(probs, top_k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


@dataclasses.dataclass(frozen=True)
class Expert:
    """The gated feed-forward network that all experts of a layer have.

    `expand` kernels compute the gate and what it multiplies, one after the
    other in the columns of one kernel or in two kernels.

    Args:
        top_k, normalize: as in `choose_experts`.
        activation: function of an array, of the gate.
        is_interleaved: bool, whether the two alternate in the columns of the
            one kernel.
        limit: float or `None`. The gate is at most this; what it multiplies
            is from minus this to this, and 1 is added. gpt-oss has it.
    """

    top_k: int
    normalize: bool
    activation: object
    is_interleaved: bool = False
    limit: float | None = None

    def __call__(self, x, logits, kernels, used=None, first=0, block=1):
        """Computes the weighted sum of the chosen experts' outputs.

        Args:
            x: float array of shape `(tokens, hidden)`.
            logits: float array of shape `(tokens, experts)`, the router's.
            kernels: dict of `expand`, a list of one or two arrays of shape
                `(experts, hidden, width)`, and `contract`, an array of shape
                `(experts, width, hidden)`; where outputs have factors also
                `scales`, a float32 array of shape `(experts,)`. They may be
                those of some experts only; the others then contribute
                nothing. With LoRA also
                `lora`, for both of these names a list of pairs of arrays of
                shape `(experts, in, rank)` and `(experts, rank, out)`, scaled.
                With biases also `biases`, for both names an array of shape
                `(experts, out)`.
            used: bool array of shape `(tokens,)` or `None`, see
                `used_tokens`.
            first: int scalar, the expert that the first kernels belong to.
            block: int, see `sort_by_expert`.

        Returns:
            A float32 array of shape `(tokens, hidden)`.
        """
        weights, experts = choose_experts(logits, self.top_k, self.normalize)
        count = kernels["contract"].shape[0]
        experts = experts - first
        local = (experts >= 0) & (experts < count)
        if "scales" in kernels:
            own = jnp.clip(experts, 0, count - 1)
            weights = weights * kernels["scales"][own]
        if used is not None:
            local &= used[:, None]
        slots = sort_by_expert(jnp.where(local, experts, count), count, block)
        rows = dispatch(x, slots)
        lora = kernels.get("lora", {})
        parts = [grouped_matmul(rows, k, slots) for k in kernels["expand"]]
        if "biases" in kernels:
            parts = [add_bias(parts[0], kernels["biases"]["expand"], slots)]
        gate, up = parts if len(parts) == 2 else self._halves(parts[0])
        for factors in lora.get("expand", ()):
            more = self._halves(_low_rank(rows, factors, slots))
            gate, up = gate + more[0], up + more[1]
        rows = self._gated(gate, up)
        out = grouped_matmul(rows, kernels["contract"], slots)
        if "biases" in kernels:
            out = add_bias(out, kernels["biases"]["contract"], slots)
        for factors in lora.get("contract", ()):
            out = out + _low_rank(rows, factors, slots)
        return combine(out, weights, slots)

    def _halves(self, rows):
        """Returns the gates and what they multiply, of the same columns."""
        if self.is_interleaved:
            return rows[:, ::2], rows[:, 1::2]
        return jnp.split(rows, 2, -1)

    def _gated(self, gate, up):
        gate, dtype = gate.astype("float32"), up.dtype
        if self.limit is None:
            return self.activation(gate).astype(dtype) * up
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up.astype("float32"), -self.limit, self.limit)
        return (self.activation(gate) * (up + 1)).astype(dtype)


def _low_rank(rows, factors, slots):
    for factor in factors:
        rows = grouped_matmul(rows, factor, slots)
    return rows


def compute_chosen_experts(layer):
    """Makes a decoder layer compute its experts as this file does, once.

    The `call` of the layer's mixture is replaced, its variables are kept. A
    layer without experts is not changed. In a call with `training=True`,
    which only Keras's own `fit` makes, KerasHub's code runs, since it adds a
    loss of the router; that of gpt-oss adds none.
    """
    block = _block_of(layer)
    if block is None or hasattr(block, "kpt_chosen"):
        return
    block.kpt_chosen = True
    if hasattr(block, "router"):
        block.call = functools.partial(_call_gpt_oss, block)
        return
    plain_call = block.call
    expert = Expert(
        top_k=block.top_k,
        # Mixtral's always add up to 1.
        normalize=getattr(block, "norm_top_k_prob", True),
        activation=getattr(block.expert_bank, "activation", jax.nn.silu),
    )
    names = ("_sparse_feedforward_gate_dense", "_router_gate")
    router = _first(block, names)
    shared = _first(block, ("shared_expert_dense", "shared_expert"))
    names = ("shared_expert_gate_dense", "_shared_expert_gate")
    shared_gate = _first(block, names)

    def call(hidden_states, attention_mask=None, training=None):
        if training:
            return plain_call(
                hidden_states, attention_mask=attention_mask, training=True
            )
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = router(x)
        out = chosen_experts(expert, x, logits, block.expert_bank)
        if shared is not None:
            out = out + shared(x) * jax.nn.sigmoid(shared_gate(x))
        return out.reshape(hidden_states.shape), logits

    block.call = call


def _first(block, names):
    """Returns the first of these attributes that there is, or `None`."""
    return next((getattr(block, x) for x in names if hasattr(block, x)), None)


def _call_gpt_oss(block, hidden_states):
    """Computes the mixture of a decoder layer of gpt-oss.

    A softmax over the chosen logits is that over all of them, normalized.
    """
    bank = block.experts
    expert = Expert(
        top_k=block.top_k,
        normalize=True,
        activation=lambda gate: gate * jax.nn.sigmoid(gate * bank.alpha),
        is_interleaved=True,
        limit=bank.limit,
    )
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = block.router.router_dense(x)
    out = chosen_experts(expert, x, logits, bank)
    return out.reshape(hidden_states.shape), logits


def chosen_share(backbone):
    """Returns the share of a backbone's experts that compute a token."""
    count = getattr(backbone, "num_experts", None)
    if not count:
        return 1
    for name in ("top_k", "num_experts_per_token"):
        if hasattr(backbone, name):
            return getattr(backbone, name) / count
    return 1


def has_experts(layer):
    """Returns whether a decoder layer has experts of this file."""
    block = _block_of(layer)
    return hasattr(block, "kpt_chosen") or hasattr(layer, "moe_expert_bank")


def _record(expert, logits):
    """Adds the routing of a layer to that of `recorded_routing`."""
    weights, layers = _ROUTING.get()
    if weights is None:
        return

    def sums(logits, weights):
        _, experts = choose_experts(logits, expert.top_k, expert.normalize)
        return routing_sums(logits, experts, weights)

    mesh, data, size, *_ = sharding.axes()
    if mesh is None or logits.shape[0] % size:
        layers.append(sums(logits, weights.reshape(-1)))
        return

    # XLA would gather the logits of all tokens to find the best.
    def local(*rows):
        return jax.tree.map(lambda x: x[None], sums(*rows))

    parts = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(data), P(data)),
        out_specs=P(data),
        check_vma=False,
    )(logits, weights.reshape(-1))
    layers.append(jax.tree.map(lambda x: x.sum(axis=0), parts))


# Hugging Face's names of the kernels of all experts in a decoder layer.
EXPERT_NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
EXPERT_NAMES_OF_GEMMA4 = ("experts.gate_up_proj", "experts.down_proj")


@dataclasses.dataclass
class ExpertKernels:
    """One of the two products of all experts of a layer.

    Attributes:
        name: str, Hugging Face's.
        kernels: list of the variables `(experts, in, out)` whose outputs are
            one after the other in the columns of Hugging Face's.
        factors: list of functions that return the LoRA factors to add, `A`
            and scaled `B`, or `None`.
    """

    name: str
    kernels: list
    factors: list


def expert_kernels(causal_lm):
    """Returns the `ExpertKernels` of a model by name, an empty dict without.

    Each is one object for as long as the model's layers exist.
    """
    found = {}
    for i, layer in enumerate(causal_lm.backbone.transformer_layers):
        block = _block_of(layer)
        names, bank = EXPERT_NAMES, bank_of(block)
        if block is None and hasattr(layer, "moe_expert_bank"):
            names, bank = EXPERT_NAMES_OF_GEMMA4, layer.moe_expert_bank
        if bank is None:
            continue
        if not hasattr(bank, "kpt_kernels"):
            # Keras tracks lists that are set as attributes.
            vars(bank)["kpt_kernels"] = [
                ExpertKernels(f"model.layers.{i}.{name}", kernels, [])
                for name, kernels in zip(names, _variables(bank))
            ]
        found.update((each.name, each) for each in bank.kpt_kernels)
    return found


def _block_of(layer):
    """Returns the mixture of a decoder layer, or `None`."""
    for name in ("mlp", "_sparse_moe_block", "sparse_moe_block"):
        block = getattr(layer, name, None)
        if bank_of(block) is not None:
            return block
    return None


def bank_of(block):
    """Returns the layer that has the experts of a mixture, or `None`."""
    found = getattr(block, "expert_bank", None)
    return found if found is not None else getattr(block, "experts", None)


def _variables(bank):
    """Returns the lists of variables of the first and the second product."""
    if hasattr(bank, "gate_up_proj"):
        return [bank.gate_up_proj], [bank.down_proj]
    if hasattr(bank, "down_proj"):
        return [bank.gate_proj, bank.up_proj], [bank.down_proj]
    expand = [
        getattr(bank, f"_expert_feedforward_{name}_dense", None)
        for name in ("gate", "intermediate")
    ]
    expand = [kernel for kernel in expand if kernel is not None]
    return expand, [bank._expert_feedforward_output_dense]


def _arrays(bank, dtype):
    """Returns `kernels` of `Expert.__call__`, of the bank's values."""
    names = ("expand", "contract")
    found = dict(zip(names, _variables(bank)))
    for name, kernels in zip(names, getattr(bank, "kpt_kernels", ())):
        factors = [f() for f in kernels.factors]
        factors = [pair for pair in factors if pair is not None]
        if factors:
            found.setdefault("lora", {})[name] = factors
    [found["contract"]] = found["contract"]
    if hasattr(bank, "gate_up_proj_bias"):
        biases = bank.gate_up_proj_bias, bank.down_proj_bias
        found["biases"] = dict(zip(names, biases))
    found = jax.tree.map(lambda x: jnp.asarray(x, dtype), found)
    if hasattr(bank, "per_expert_scale"):
        found["scales"] = jnp.asarray(bank.per_expert_scale, "float32")
    return found


def chosen_experts(expert, x, logits, bank):
    """Computes the experts, on a mesh on each device for its own tokens.

    `expert` is an `Expert`, `x` and `logits` are as in its call, and `bank`
    is KerasHub's layer of the experts' weights. Returns an array like `x`.

    If the experts are split over the mesh's other axis, each device computes
    those that it has, and the results are added up.
    """
    _record(expert, logits)
    kernels = _arrays(bank, x.dtype)
    used = _USED_TOKENS.get()
    mesh, data, size, model, _ = sharding.axes()
    count = kernels["contract"].shape[0]
    if mesh is None or x.shape[0] % size:
        block = _block(x.shape[0] * expert.top_k, count)
        return expert(x, logits, kernels, used, block=block).astype(x.dtype)
    if used is None:
        used = jnp.ones(x.shape[0], bool)
    split = sharding.split_of(_variables(bank)[1][0])
    if split.axes[0] != model or model in split.to_save_memory:
        model = None

    def local(x, logits, used, kernels):
        own = kernels["contract"].shape[0]
        first = jax.lax.axis_index(model) * own if model else 0
        block = _block(x.shape[0] * expert.top_k, count)
        out = expert(x, logits, kernels, used, first, block)
        if model is None:
            return out.astype(x.dtype)
        # XLA's CPU backend cannot add up bfloat16.
        if sharding.platform() != "cpu":
            out = out.astype(x.dtype)
        return jax.lax.psum(out, model).astype(x.dtype)

    rows = P(data)
    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, P(model)),
        out_specs=rows,
        check_vma=False,
    )(x, logits, used, kernels)
    return checkpoint_name(out, sharding.SUMMED) if model else out


def _block(choices, experts):
    """Returns the rows of a block on the devices that the program is for."""
    return block_size(choices, experts) if sharding.platform() == "cpu" else 1
