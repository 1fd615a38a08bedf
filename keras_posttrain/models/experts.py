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
from keras_posttrain.models.expert_parallel import compute_elsewhere
from keras_posttrain.models.grouped_matmul import (
    add_bias,
    block_size,
    combine,
    dispatch,
    grouped_matmul,
    sort_by_expert,
)
from keras_posttrain.models.rematerialisation import PRODUCT

_USED_TOKENS = contextvars.ContextVar("used_tokens", default=None)


@dataclasses.dataclass
class Recorder:
    """What is recorded of each mixture that is called, in order.

    Attributes:
        weights: float array, how often each token counts, or `None` to
            record no sums.
        sums: list of `RoutingSums`.
        choices: list of int32 arrays of shape `(tokens, top_k)`, the experts
            of each token; `None` to record none.
    """

    weights: jax.Array | None = None
    sums: list = dataclasses.field(default_factory=list)
    choices: list | None = None

    def empty(self):
        """Returns one for the same things that has none yet."""
        choices = None if self.choices is None else []
        return Recorder(self.weights, [], choices)

    def found(self):
        """Returns what was recorded, a pytree for `add`."""
        return self.sums, self.choices

    def add(self, found):
        """Adds what another one has `found`."""
        sums, choices = found
        self.sums.extend(sums)
        if choices is not None:
            self.choices.extend(choices)


_RECORDER = contextvars.ContextVar("recorder", default=None)
# An iterator over the choices that the next mixtures are given, or `None`.
_GIVEN = contextvars.ContextVar("given", default=None)


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
    with _recording(Recorder(weights)) as recorder:
        yield recorder.sums


@contextlib.contextmanager
def recorded_choices(is_recorded=True):
    """Records the experts that tokens choose in each mixture called inside.

    Yields:
        A list of int32 arrays of shape `(tokens, top_k)`, filled by the
        calls.
    """
    if not is_recorded:
        yield []
        return
    with _recording(Recorder(choices=[])) as recorder:
        yield recorder.choices


@contextlib.contextmanager
def routing_of_layer():
    """Records what is called inside apart from the scope around it.

    A transformation such as `jax.checkpoint` has to return what is computed
    in it. The `Recorder` that is yielded has it; see `add_routing`.
    """
    with _recording((_RECORDER.get() or Recorder()).empty()) as recorder:
        yield recorder


def add_routing(found):
    """Adds what a `Recorder` has `found` to that of the scope around."""
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.add(found)


@contextlib.contextmanager
def _recording(recorder):
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


@contextlib.contextmanager
def given_choices(choices):
    """Gives the mixtures called inside the experts of their tokens.

    Routing replay ([Ma et al., 2025](https://arxiv.org/abs/2510.11370)): the
    weights of these experts are of the router's own logits, and its gradient
    is that of the weights.

    Args:
        choices: int array of shape `(tokens, mixtures, top_k)`, in the order
            of the calls; tokens with -1 choose themselves. `None` to give
            none.
    """
    layers = None
    if choices is not None:
        choices = choices.astype("int32")
        layers = iter([choices[:, i] for i in range(choices.shape[1])])
    token = _GIVEN.set(layers)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def choose_experts(logits, top_k, normalize, given=None):
    """Chooses the experts of each token, in float32.

    Args:
        logits: float array of shape `(tokens, experts)`.
        top_k: int, the experts of a token.
        normalize: bool, whether a token's weights add up to 1. If not, they
            are the probabilities among all experts.
        given: int array of shape `(tokens, top_k)`, experts to take in place
            of the best ones; of tokens with -1 the best. Or `None`.

    Returns:
        `(weights, experts)`: a float32 and an int32 array of shape
        `(tokens, top_k)`, best or as given first.
    """
    probs = jax.nn.softmax(logits.astype("float32"), axis=-1)
    weights, experts = jax.lax.top_k(probs, top_k)
    if given is not None:
        experts = jnp.where(given < 0, experts, given)
        weights = jnp.take_along_axis(probs, experts, axis=-1)
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

    def __call__(
        self, x, logits, kernels, used=None, first=0, block=1, given=None
    ):
        """Computes the weighted sum of the chosen experts' outputs.

        Args:
            x: float array of shape `(tokens, hidden)`.
            logits: float array of shape `(tokens, experts)`, the router's.
            kernels: as in `compute`. They may be those of some experts only;
                the others then contribute nothing.
            used: bool array of shape `(tokens,)` or `None`, see
                `used_tokens`.
            first: int scalar, the expert that the first kernels belong to.
            block: int, see `sort_by_expert`.
            given: as in `choose_experts`.

        Returns:
            A float32 array of shape `(tokens, hidden)`.
        """
        weights, experts = self.choose(logits, used, given)
        return self.compute(x, weights, experts - first, kernels, block)

    def choose(self, logits, used=None, given=None):
        """Chooses experts as `choose_experts`, of unused tokens none.

        Their experts are beyond the last one.
        """
        weights, experts = choose_experts(
            logits, self.top_k, self.normalize, given
        )
        if used is not None:
            experts = jnp.where(used[:, None], experts, logits.shape[-1])
        return weights, experts

    def compute(self, x, weights, experts, kernels, block=1):
        """Computes the weighted sum of given experts' outputs.

        Args:
            x: float array of shape `(tokens, hidden)`.
            weights: float32 array of shape `(tokens, choices)`.
            experts: int array of that shape. An index that is out of the
                kernels' range contributes nothing.
            kernels: dict of `expand`, a list of one or two arrays of shape
                `(experts, hidden, width)`, and `contract`, an array of shape
                `(experts, width, hidden)`; where outputs have factors also
                `scales`, a float32 array of shape `(experts,)`. With LoRA
                also `lora`, for both of these names a list of pairs of arrays
                of shape `(experts, in, rank)` and `(experts, rank, out)`,
                scaled. With biases also `biases`, for both names an array of
                shape `(experts, out)`.
            block: int, see `sort_by_expert`.

        Returns:
            A float32 array of shape `(tokens, hidden)`.
        """
        count = kernels["contract"].shape[0]
        local = (experts >= 0) & (experts < count)
        if "scales" in kernels:
            own = jnp.clip(experts, 0, count - 1)
            weights = weights * kernels["scales"][own]
        slots = sort_by_expert(jnp.where(local, experts, count), count, block)
        rows = dispatch(x, slots)
        lora = kernels.get("lora", {})
        parts = [
            checkpoint_name(grouped_matmul(rows, k, slots), PRODUCT)
            for k in kernels["expand"]
        ]
        if "biases" in kernels:
            parts = [add_bias(parts[0], kernels["biases"]["expand"], slots)]
        gate, up = parts if len(parts) == 2 else self._halves(parts[0])
        for factors in lora.get("expand", ()):
            more = self._halves(_low_rank(rows, factors, slots))
            gate, up = gate + more[0], up + more[1]
        rows = self._gated(gate, up)
        out = grouped_matmul(rows, kernels["contract"], slots)
        out = checkpoint_name(out, PRODUCT)
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
    return (num_choices(backbone) or count) / count if count else 1


def num_choices(backbone):
    """Returns the experts that a token of a backbone chooses, 0 if unknown."""
    for name in ("top_k", "num_experts_per_token"):
        if hasattr(backbone, name):
            return getattr(backbone, name) or 0
    return 0


def is_recorded(layer):
    """Returns whether `recorded_routing` has the routing of a layer."""
    block = _block_of(layer)
    return hasattr(block, "kpt_chosen") or hasattr(layer, "moe_expert_bank")


def _record(expert, logits, given):
    """Adds the routing of a layer to what is recorded."""
    recorder = _RECORDER.get() or Recorder()
    mesh, data, size, *_ = sharding.axes()
    is_whole = mesh is None or logits.shape[0] % size

    def choose(logits, given):
        return expert.choose(logits, given=given)[1]

    if recorder.choices is not None:
        each = choose
        if not is_whole:
            each = sharding.on_devices(choose, mesh, P(data), P(data))
        recorder.choices.append(each(logits, given))
    if recorder.weights is None:
        return

    def sums(logits, given, weights):
        return routing_sums(logits, choose(logits, given), weights)

    layers, weights = recorder.sums, recorder.weights.reshape(-1)
    if is_whole:
        layers.append(sums(logits, given, weights))
        return

    # XLA would gather the logits of all tokens to find the best.
    def local(*rows):
        return jax.tree.map(lambda x: x[None], sums(*rows))

    run = sharding.on_devices(local, mesh, P(data), P(data))
    parts = run(logits, given, weights)
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


def kernels_of(layer):
    """Lists the kernels `(experts, in, out)` of a decoder layer."""
    bank = bank_of(_block_of(layer))
    if bank is None:
        bank = getattr(layer, "moe_expert_bank", None)
    return [] if bank is None else [v for x in _variables(bank) for v in x]


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
    those that it has, and the results are added up. If they are split over
    devices with rows of their own, tokens are sent to them.
    """
    layers = _GIVEN.get()
    given = None if layers is None else next(layers)
    _record(expert, logits, given)
    kernels = _arrays(bank, x.dtype)
    used = _USED_TOKENS.get()
    mesh, data, size, model, _ = sharding.axes()
    count = kernels["contract"].shape[0]
    if mesh is None or x.shape[0] % size:
        block = _block(x.shape[0] * expert.top_k, count)
        out = expert(x, logits, kernels, used, block=block, given=given)
        return out.astype(x.dtype)
    if used is None:
        used = jnp.ones(x.shape[0], bool)
    split = sharding.split_of(_variables(bank)[1][0])
    if split.mesh is sharding.expert_mesh():
        out = _sent(expert, x, logits, used, given, kernels, split.mesh)
        return checkpoint_name(out, sharding.SUMMED)
    if split.axes[0] != model or model in split.to_save_memory:
        model = None

    def local(x, logits, used, given, kernels):
        own = kernels["contract"].shape[0]
        first = jax.lax.axis_index(model) * own if model else 0
        block = _block(x.shape[0] * expert.top_k, count)
        out = expert(x, logits, kernels, used, first, block, given)
        if model is None:
            return out.astype(x.dtype)
        # XLA's CPU backend cannot add up bfloat16.
        if sharding.platform() != "cpu":
            out = out.astype(x.dtype)
        return jax.lax.psum(out, model).astype(x.dtype)

    rows = P(data)
    specs = (rows, rows, rows, rows, P(model))
    run = sharding.on_devices(local, mesh, specs, rows)
    out = run(x, logits, used, given, kernels)
    return checkpoint_name(out, sharding.SUMMED) if model else out


def _sent(expert, x, logits, used, given, kernels, mesh):
    """Computes experts that devices with other rows have."""
    names = mesh.axis_names

    def compute(x, weights, experts, kernels):
        own = kernels["contract"].shape[0]
        block = _block(x.shape[0], own)
        return expert.compute(x, weights, experts, kernels, block)

    def local(x, logits, used, given, kernels):
        weights, experts = expert.choose(logits, used, given)
        out = compute_elsewhere(compute, x, weights, experts, kernels, names)
        return out.astype(x.dtype)

    rows = P(names)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, rows, P(names[-1])),
        out_specs=rows,
        check_vma=False,
    )(x, logits, used, given, kernels)


def _block(choices, experts):
    """Returns the rows of a block on the devices that the program is for."""
    return block_size(choices, experts) if sharding.platform() == "cpu" else 1
