"""Low-rank adapters: settings, weights, merging and PEFT files."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import numbers
import pathlib
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
from safetensors.numpy import save_file

from keras_posttrain import _console
from keras_posttrain.models import device_transfer, linear
from keras_posttrain.models.experts import expert_kernels
from keras_posttrain.models.hf.adapter_files import (
    CONFIG_FILE,
    PREFIX,
    TEXT_MODEL,
    WEIGHTS_FILE,
    lora_settings,
    module_name,
    module_names,
    open_weights,
    read_config,
)
from keras_posttrain.models.hf.tensors import (
    Part,
    Tensor,
    arrays_of,
    family_of,
    linear_layers,
    linear_modules,
)
from keras_posttrain.models.lora_pairs import ExpertPair, FusedPair, Pair
from keras_posttrain.models.quantized import check_not_quantized
from keras_posttrain.models.vision import freeze_tower, tower_of


def _is_number(x):
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


# Arguments of PEFT's `LoraConfig`, and those of `LoRA`.
PEFT_NAMES = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "use_rslora": "rslora",
}


def _knows_peft(cls):
    """Makes a class name its own arguments for those of PEFT."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        for name in PEFT_NAMES.keys() & kwargs.keys():
            raise TypeError(
                f"`{cls.__name__}` has no argument `{name}`, PEFT's name; use "
                f"`{PEFT_NAMES[name]}`. Received: {name}={kwargs[name]!r}"
            )
        init(self, *args, **kwargs)

    cls.__init__ = checked
    return cls


@_knows_peft
@dataclasses.dataclass(frozen=True)
class LoRA:
    r"""Low-rank adaptation of the linear layers of a model.

    Each adapted layer computes `x W + (alpha / rank) (x A) B`, where `W` is
    frozen, `A` has the shape `(in, rank)` and `B` the shape `(rank, out)`.
    The kernel is reshaped to a matrix for this. `A @ B` is never computed in
    training. `A` is initialized uniformly in ±1/sqrt(in) and `B` to zero;
    both are float32.

    Args:
        rank: int, the inner dimension.
        alpha: float, the scale's numerator. Defaults to `2 * rank`.
        dropout: float in [0, 1), the probability that an input feature of
            the adapter is dropped while training.
        targets: `"all-linear"` (q, k, v, o, gate, up and down of every
            decoder layer), or a regular expression or a list of them, each
            matched against the end of Hugging Face module names such as
            `model.layers.0.self_attn.q_proj`: `"q_proj|v_proj"`. The experts
            of a mixture are adapted where a pattern names them: `"experts"`,
            or `r"experts\.down_proj"`.
        rslora: bool, whether to scale by `alpha / sqrt(rank)` instead
            ([Kalajdzievski, 2023](https://arxiv.org/abs/2312.03732)).
        seed: int, the seed of the initial values of `A`.

    Example:

    ```python
    task = kpt.SFTTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=16))
    ```

    Reference:
        - [Hu et al., 2021](https://arxiv.org/abs/2106.09685).
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | tuple | list = "all-linear"
    rslora: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("rank", "alpha", "dropout", "seed"):
            value = getattr(self, name)
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        if self.alpha is None and isinstance(self.rank, int):
            object.__setattr__(self, "alpha", 2 * self.rank)
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(
                "`rank` must be a positive int, the inner dimension of the "
                f"adapter (8 to 64 is usual). Received: rank={self.rank!r}"
            )
        if not _is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise ValueError(
                "`alpha` must be a positive number, or None for `2 * rank`. "
                f"Received: alpha={self.alpha!r}"
            )
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(
                "`dropout` must be a probability in [0, 1). "
                f"Received: dropout={self.dropout!r}"
            )
        if not isinstance(self.rslora, bool):
            raise ValueError(
                "`rslora` must be True or False. "
                f"Received: rslora={self.rslora!r}"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise ValueError(
                "`seed` must be an int from 0 to 2147483647. "
                f"Received: seed={self.seed!r}"
            )
        try:
            for pattern in self.patterns:
                re.compile(pattern)
            wrong = None if self.patterns else "no pattern"
        except (re.error, TypeError) as e:
            wrong = e
        if wrong is not None:
            raise ValueError(
                "`targets` must be 'all-linear', a regular expression or a "
                f"list of them. Received: targets={self.targets!r} ({wrong})"
            )

    @property
    def patterns(self):
        """The regular expressions of `targets`, for the ends of names."""
        if self.targets == "all-linear":
            return (".*",)
        if isinstance(self.targets, str):
            return (self.targets,)
        return self.targets

    @property
    def scale(self):
        """The factor of the low-rank part."""
        divisor = self.rank**0.5 if self.rslora else self.rank
        return self.alpha / divisor

    def matches(self, name):
        """Returns whether the layer of this Hugging Face name is adapted."""
        return any(re.search(f"(?:{p})$", name) for p in self.patterns)

    def shape(self):
        """Returns the settings that must match to load another's weights."""
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora}


def _adapts_experts(lora, name):
    """Returns whether the experts' kernels of this name are adapted.

    A pattern must match the module, such as `model.layers.0.mlp.experts`, or
    name it: `down_proj` alone means linear layers.
    """
    if lora.targets == "all-linear":
        return False
    module = name.rsplit(".", 1)[0]
    return any(
        re.search(f"(?:{p})$", module)
        or ("experts" in p and re.search(f"(?:{p})$", name))
        for p in lora.patterns
    )


@dataclasses.dataclass
class DropoutKeys:
    """The random keys of the dropout masks of one step.

    A mask depends only on the step, the layer, the sequence and the token's
    position in it: not on rows, packing or micro-batches. `step_key` is a JAX
    key of the seed and the step; the int32 arrays have the shape `(tokens,)`.
    """

    step_key: jax.Array
    sequences: jax.Array
    positions: jax.Array

    def mask(self, layer, features, rate):
        """Samples the features to keep, bool of shape `(tokens, features)`."""
        key = jax.random.fold_in(self.step_key, layer)

        def token(sequence, position):
            at = jax.random.fold_in(
                jax.random.fold_in(key, sequence), position
            )
            return jax.random.bernoulli(at, 1 - rate, (features,))

        return jax.vmap(token)(self.sequences, self.positions)


class Adapter(keras.layers.Layer):
    """The LoRA weights of a causal language model.

    Creating an adapter freezes the model and makes its linear layers add
    their low-rank part. The weights belong to this layer and not to the
    model's layers, so that the base stays bit-equal.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        lora: `LoRA`.
        below: `Adapter` of the same model that stays on, frozen, or `None`.
    """

    def __init__(self, causal_lm, lora, below=None, name="lora"):
        super().__init__(name=name, dtype="float32")
        check_free(causal_lm, below)
        self.lora, self.below = lora, below
        if below is not None:
            below.trainable = False
        layers = linear_modules(causal_lm)
        self.pairs = [
            Pair(name, *own) if len(own) == 1 else FusedPair(name, own)
            for name, own in layers.items()
            if lora.matches(name)
        ]
        stacks = expert_kernels(causal_lm)
        self.pairs += [
            ExpertPair(stack)
            for name, stack in stacks.items()
            if _adapts_experts(lora, name)
        ]
        self.names = [*layers, *stacks]
        self.has_tower = tower_of(causal_lm.backbone) is not None
        for pattern in lora.patterns:
            one = dataclasses.replace(lora, targets=pattern)
            found = any(map(one.matches, layers))
            found = found or any(_adapts_experts(one, x) for x in stacks)
            if not found:
                raise ValueError(
                    f"No linear layer matches {pattern!r} of `targets`; "
                    f"names look like {self.names[0]!r}. "
                    f"Received: targets={lora.targets!r}"
                )
        most = max(min(p.in_size, p.out_size) for p in self.pairs)
        if lora.rank > most:
            raise ValueError(
                f"`rank` must be at most {most}, the rank of this model's "
                "largest adapted layer (8 to 64 is usual). "
                f"Received: rank={lora.rank}"
            )
        experts = [p for p in self.pairs if isinstance(p, ExpertPair)]
        if experts and lora.dropout:
            raise ValueError(
                "Adapters of experts have no dropout, as in PEFT. Use "
                "dropout=0.0, or leave the experts out of `targets`. "
                f"Received: dropout={lora.dropout}, targets={lora.targets!r}"
            )
        taken = [
            p.name
            for p in self.pairs
            if any(getattr(layer, "lora_enabled", 0) for layer in p.layers)
        ]
        if taken:
            raise ValueError(
                "Keras's own LoRA is enabled on this model; it trains other "
                "matrices, which no other library reads. Load the model again "
                "and pass `lora=kpt.LoRA(...)` alone. "
                f"Received: {taken[0]!r} and {len(taken) - 1} more"
            )
        self.check_layers()
        causal_lm.trainable = False
        self.a, self.b = [], []
        for pair in self.pairs:
            uniform = _uniform(pair, lora.seed)
            layouts = pair.factor_layouts()
            shapes = pair.factor_shapes(lora.rank)
            # `add_weight` would not let us choose the layout.
            with keras.name_scope(self.name):
                a = keras.Variable(
                    uniform,
                    shape=shapes[0],
                    dtype="float32",
                    name=f"{pair.name}.lora_a",
                    layout=layouts[0],
                )
                b = keras.Variable(
                    "zeros",
                    shape=shapes[1],
                    dtype="float32",
                    name=f"{pair.name}.lora_b",
                    layout=layouts[1],
                )
            self.a.append(a)
            self.b.append(b)
        self.built = True
        self._active = True
        self._dropout = None
        self.attach()

    def initial_factors(self, seed):
        """Returns the values of each `A` that `LoRA(seed=seed)` begins with.

        Those of each `B` are zero.
        """
        return [
            _uniform(pair, seed)(a.shape, dtype="float32")
            for pair, a in zip(self.pairs, self.a)
        ]

    def check_layers(self):
        """Raises a `ValueError` where Keras would not call the adapter."""
        found = [(p, layer) for p in self.pairs for layer in p.layers]
        for pair, layer in found:
            mode = getattr(layer, "quantization_mode", None)
            if mode is not None:
                raise ValueError(
                    "An adapter over layers that Keras has quantized would "
                    "learn nothing: Keras calls the quantized layer without "
                    "it. Quantize a model before a task is made of it. "
                    f"Received: layer {pair.name!r} with "
                    f"quantization_mode={mode!r}"
                )

    def attach(self):
        """Makes the layers of the model add their low-rank part."""
        for i, pair in enumerate(self.pairs):
            pair.attach(self, i)

    def expert_factors(self, i):
        """Returns `(A, scale * B)` of layer `i`, `None` while turned off."""
        if not self._active:
            return None
        return self.a[i].value, self.b[i].value * self.lora.scale

    def adapted_call(self, pair, columns=slice(None)):
        """Returns a `call` of a linear layer with the low-rank part.

        `columns` are those of B that belong to the layer.
        """
        factors = self.a[pair.number], self.b[pair.number]

        def call(inputs, *args, **kwargs):
            outputs = pair.plain_call(inputs, *args, **kwargs)
            if not self._active:
                return outputs
            batch = inputs.shape[: inputs.ndim - len(pair.axes.in_shape)]
            x = jnp.reshape(inputs, (-1, pair.in_size))
            if self.drops_inputs:
                rate = self.lora.dropout
                keep = self._dropout.mask(pair.number, pair.in_size, rate)
                x = jnp.where(keep, x / (1 - rate), 0)
            # On XLA's CPU backend a gradient of shape (in, rank) takes ten
            # times as long as its transpose. The barrier prevents XLA from
            # replacing one by the other.
            a = factors[0].value.astype(x.dtype).T
            a = jax.lax.optimization_barrier(a)
            b = factors[1].value[:, columns].astype(x.dtype)
            low = linear.low_rank(pair.layer, x, a, b, self.lora.scale)
            low = low.reshape(*batch, *pair.axes.out_shape).astype(
                outputs.dtype
            )
            return outputs + low

        call.adapter = self
        return call

    @property
    def stack(self):
        """Tuple of the adapters of the model, from the lowest to this one."""
        return (*(self.below.stack if self.below else ()), self)

    def detach(self, causal_lm):
        """Removes the adapter from the model and unfreezes what is below."""
        for pair in self.pairs:
            pair.detach()
        (self.below or causal_lm).trainable = True
        freeze_tower(causal_lm)

    @property
    def is_zero(self):
        """Bool, whether the adapter changes nothing: all `B` are 0.

        Variables that hold shapes alone count as 0, their initial value.
        """
        if not all(isinstance(b._value, jax.Array) for b in self.b):
            return True
        return not any(bool(jnp.any(b.value != 0)) for b in self.b)

    @contextlib.contextmanager
    def disabled(self):
        """Turns the adapter off inside the scope."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    @property
    def drops_inputs(self):
        """Bool, whether layers drop inputs: inside of `dropout`, by a rate."""
        return self._dropout is not None and self.lora.dropout > 0

    @contextlib.contextmanager
    def dropout(self, keys):
        """Drops inputs of the adapter inside the scope, by `DropoutKeys`."""
        self._dropout = keys
        try:
            yield
        finally:
            self._dropout = None

    def merged_kernel(self, i, factors=None, kernel=None, variable=None):
        """Computes the kernel of layer `i` of `pairs` with the adapter added.

        `factors` are arrays to use as `A` and `B` instead of the adapter's,
        `kernel` one to add to instead of the layer's, `variable` that of the
        layer's kernels, by default the first. The result has the kernel's
        shape and dtype.
        """
        pair = self.pairs[i]
        variable = pair.kernels[0] if variable is None else variable
        if kernel is None:
            kernel = variable.value
        is_split = isinstance(kernel.sharding, jax.sharding.NamedSharding)
        a, b = factors or (self.a[i].value, self.b[i].value)
        shape, order = pair.kernel_axes(variable)
        return _merged(
            kernel,
            a,
            pair.columns(variable, b),
            shape=shape,
            order=order,
            scale=self.lora.scale,
            target=kernel.sharding if is_split else None,
        )

    @property
    def is_merged(self):
        return self.pairs[0].base is not None

    def merge(self):
        """Adds the adapter to the kernels; `unmerge` undoes this."""
        if self.is_merged:
            raise ValueError(
                "The adapter is merged already; call `unmerge_adapter()` "
                "first."
            )
        for i, pair in enumerate(self.pairs):
            pair.base = [kernel.value for kernel in pair.kernels]
            for kernel in pair.kernels:
                kernel.assign(self.merged_kernel(i, variable=kernel))
        self._active = False

    def unmerge(self):
        """Restores the kernels that `merge` replaced, bit-equal."""
        if not self.is_merged:
            raise ValueError("The adapter is not merged: nothing to undo.")
        for pair in self.pairs:
            for kernel, value in zip(pair.kernels, pair.base):
                kernel.assign(value)
            pair.base = None
        self._active = True

    def forget_base(self):
        """Makes a merge final."""
        for pair in self.pairs:
            pair.base = None

    def merged_values(self):
        """Returns a function from a variable to its value for an export.

        For the kernel of an adapted layer the adapter is added, and those
        below it.
        """
        added = {}
        for adapter in self.stack:
            for i, pair in enumerate(adapter.pairs):
                for kernel in pair.kernels if pair.base is None else ():
                    added.setdefault(id(kernel), []).append((adapter, i))

        def values(variable):
            value = variable.value
            for adapter, i in added.get(id(variable), ()):
                value = adapter.merged_kernel(i, None, value, variable)
            return value

        return values

    def save(self, directory, base_name=None):
        """Writes an adapter that PEFT and vLLM load, with its base's name.

        A stack of adapters is written as one, whose rank is the sum of
        theirs.
        """
        directory = pathlib.Path(directory)
        lora = self.saved_lora
        if apart := self._apart_from_peft():
            _console.say(
                f"{directory}: PEFT takes the names gate_proj, up_proj and "
                "down_proj in this type of model for its experts, so that it "
                f"does not load what was trained of {apart[0]} and "
                f"{len(apart) - 1} more layers. This library does. For PEFT "
                'use `kpt.LoRA(targets="self_attn.*")`.'
            )
        tensors = {
            name: device_transfer.contiguous(array)
            for name, array in self._saved_tensors()
        }
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "use_rslora": lora.rslora,
            "target_modules": self._target_modules(),
            "target_parameters": self._target_parameters(),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }

        def write():
            directory.mkdir(parents=True, exist_ok=True)
            path = str(directory / WEIGHTS_FILE)
            save_file(tensors, path, metadata={"format": "pt"})
            text = json.dumps(config, indent=2, sort_keys=True)
            (directory / CONFIG_FILE).write_text(text + "\n")

        device_transfer.on_first(write)

    def _apart_from_peft(self):
        """Lists adapted MLPs of a mixture's layers without experts."""
        has_experts = any(".mlp.experts." in name for name in self.names)
        names = [p.name for each in self.stack for p in each.pairs]
        return [
            name
            for name in names
            if has_experts and re.search(r"\.mlp\.\w+_proj$", name)
        ]

    def _tensors(self):
        """Yields the factors under PEFT's names, transposed as in PEFT."""
        for pair, *factors in zip(self.pairs, self.a, self.b):
            module = self._peft_module(pair)
            for part, variable in zip("AB", factors):
                name = f"{PREFIX}{module}.lora_{part}.weight"
                axes = pair.peft_axes[part]
                yield Tensor(name, (Part(variable, axes),))

    def _peft_module(self, pair):
        """Returns the name of the module that PEFT has for a layer.

        PEFT wraps all experts of a layer once for each parameter, the last
        one outermost.
        """
        if not isinstance(pair, ExpertPair):
            return self._peft_name(pair.name)
        module = pair.name.rsplit(".", 1)[0]
        own = [
            p.name
            for each in self.stack
            for p in each.pairs
            if p.name.startswith(f"{module}.")
        ]
        depth = sum(not name.endswith(pair.name) for name in set(own))
        inner = pair.name.endswith("gate_up_proj")
        return module + ".base_layer" * (depth if inner else 0)

    def _peft_name(self, name):
        """Returns a layer's name in PEFT, which loads the whole model.

        The decoder of a model with a vision tower is a part of it.
        """
        if not self.has_tower:
            return name
        return name.replace("model.", TEXT_MODEL, 1)

    @property
    def saved_lora(self):
        """The `LoRA` of the files that `save` writes."""
        if self.below is None:
            return self.lora
        rank = sum(adapter.lora.rank for adapter in self.stack)
        targets = [p for adapter in self.stack for p in adapter.lora.patterns]
        return dataclasses.replace(
            self.lora, rank=rank, alpha=rank, rslora=False, targets=targets
        )

    def _saved_tensors(self):
        """Yields `(name, array)` as `save` writes them."""
        if self.below is None:
            yield from arrays_of(self._tensors(), lambda v: v.value)
            return
        rank, first = self.saved_lora.rank, 0
        whole, pairs = {}, {}
        for adapter in self.stack:
            part = slice(first, first + adapter.lora.rank)
            for pair, a, b in zip(adapter.pairs, adapter.a, adapter.b):
                if pair.name not in whole:
                    pairs[pair.name] = pair
                    whole[pair.name] = [
                        np.zeros(shape, "float32")
                        for shape in pair.factor_shapes(rank)
                    ]
                a, b = (device_transfer.to_host(x.value) for x in (a, b))
                whole[pair.name][0][..., part] = a
                whole[pair.name][1][..., part, :] = b * adapter.lora.scale
            first = part.stop
        for name, factors in whole.items():
            pair = pairs[name]
            module = self._peft_module(pair)
            for part, array in zip("AB", factors):
                axes = pair.peft_axes[part]
                order = [axis for each in axes for axis in each]
                shape = [
                    math.prod(array.shape[axis] for axis in each)
                    for each in axes
                ]
                array = array.transpose(order).reshape(shape)
                yield f"{PREFIX}{module}.lora_{part}.weight", array

    def _target_modules(self):
        """Returns PEFT's `target_modules`.

        These are the last parts of the names, such as `q_proj`, if all layers
        that end in them are adapted; otherwise the full names.
        """
        adapted = {
            p.name
            for adapter in self.stack
            for p in adapter.pairs
            if not isinstance(p, ExpertPair)
        }
        lasts = {name.rsplit(".", 1)[-1] for name in adapted}
        named = {n for n in self.names if n.rsplit(".", 1)[-1] in lasts}
        if self.has_tower:
            # The tower has layers of the same names.
            return sorted(map(self._peft_name, adapted))
        return sorted(lasts if named == adapted else adapted)

    def _target_parameters(self):
        """Returns PEFT's `target_parameters`, `None` without experts."""
        found = {
            p.name
            for adapter in self.stack
            for p in adapter.pairs
            if isinstance(p, ExpertPair)
        }
        return sorted(found) or None

    def load(self, directory):
        """Loads the weights of a PEFT adapter of equal rank and layers.

        If the adapter has another method, rank or set of layers, it raises a
        `ValueError` and changes no weight.
        """
        if self.below is not None:
            raise ValueError(
                "This adapter is stacked on another, and a file holds one. "
                "Load it into a task of the model alone. "
                f"Received: {str(directory)!r}"
            )
        given = lora_from_config(read_config(directory), directory)
        if given.shape() != self.lora.shape():
            raise ValueError(
                f"The adapter in {str(directory)!r} was made with "
                f"{given.shape()}, the task's with {self.lora.shape()}. "
                "Give the task the adapter's settings: "
                f"lora=kpt.LoRA(rank={given.rank}, alpha={given.alpha}, "
                f"rslora={given.rslora})."
            )
        stored = open_weights(directory)
        self._check_names(stored)
        for tensor in self._tensors():
            shape = stored.shapes[tensor.name]
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name} in {str(directory)!r} has shape "
                    f"{shape}, this model needs {tensor.shape}: the adapter "
                    "belongs to another model."
                )
            stored.check_dtype(tensor.name)
        pairs = []
        for tensor in self._tensors():
            [part] = tensor.parts
            read = functools.partial(part.read, stored.view(tensor.name))
            pairs.append((part.variable, read))
        device_transfer.fill_all(pairs)

    def _check_names(self, stored):
        """Checks that a stored adapter has the layers of this one."""
        directory, wanted = stored.directory, set()
        for tensor in self._tensors():
            wanted.add(tensor.name)
            if tensor.name not in stored.names:
                name = module_name(tensor.name).removeprefix(PREFIX)
                raise ValueError(
                    f"The adapter in {str(directory)!r} has no weights "
                    f"for {name!r}, which `targets` names; it has "
                    f"{module_names(stored.names)}. Pass these as "
                    "`kpt.LoRA(targets=...)`."
                )
        more = stored.names - wanted
        if more:
            known = {f"{PREFIX}{self._peft_name(n)}" for n in self.names}
            if all(module_name(name) in known for name in more):
                why = "the task's `targets` leaves out"
            else:
                why = (
                    "are not all linear layers of this model's decoder, which "
                    "alone can be adapted"
                )
            raise ValueError(
                f"The adapter in {str(directory)!r} also adapts "
                f"{module_names(more)}, which {why}. "
                f"Received: targets={self.lora.targets!r}"
            )


def _uniform(pair, seed):
    """Returns the initializer of `A`, which differs between layers."""
    bound = 1 / np.sqrt(pair.in_size)
    digest = hashlib.sha256(f"{seed}/{pair.name}".encode())
    seed = int.from_bytes(digest.digest()[:4], "little") >> 1
    return keras.initializers.RandomUniform(-bound, bound, seed=seed)


def adapter_of(causal_lm, lora):
    """Returns the adapter of a task, or `None`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        lora: `LoRA` of a new adapter, an `Adapter` that was handed over, or
            `None`.
    """
    if isinstance(lora, Adapter):
        return lora
    if lora is not None:
        return Adapter(causal_lm, lora)
    check_free(causal_lm)
    return None


@contextlib.contextmanager
def handed_over(causal_lm, adapter, how, lora):
    """Opens a scope in which the next task of a model is made.

    If that raises, the model is as before.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        adapter: `Adapter` of the earlier task, or `None`.
        how: str, the argument `adapter` of `Task.from_task`.
        lora: `LoRA` or `None`.

    Yields:
        An `Adapter`, a `LoRA` or `None`, for the next task.
    """
    how = check_hand_over(adapter, how, lora)
    before = attached(causal_lm) if adapter else ()
    added = []
    try:
        if how == "merge":
            check_not_quantized(causal_lm, "adapter='merge'")
            added = [each for each in before if not each.is_merged]
            for each in reversed(before):
                if each in added:
                    each.merge()
                each.detach(causal_lm)
        elif how == "continue":
            lora = adapter
        elif how == "stack":
            lora = Adapter(causal_lm, lora, below=adapter)
        yield lora
    except BaseException:
        for each in reversed(attached(causal_lm)):
            if each not in before:
                each.detach(causal_lm)
        if how == "merge":
            for each in before:
                each.attach()
                if each in added and each.is_merged:
                    each.unmerge()
            causal_lm.trainable = False
        raise
    if how == "merge":
        for each in before:
            each.forget_base()


def check_hand_over(adapter, how, lora):
    """Returns how an adapter is handed over; checks as `from_task` says."""
    if how not in ("auto", "continue", "merge", "stack"):
        raise ValueError(
            "`adapter` must be 'auto', 'continue', 'merge' or 'stack'. "
            f"Received: adapter={how!r}"
        )
    if adapter is None:
        return None
    if how == "auto":
        how = "stack" if lora else "continue"
    if how == "continue" and lora is not None:
        raise ValueError(
            "An adapter that is trained further keeps its settings. Leave "
            "`lora` out, or use adapter='stack' or 'merge' for a new one. "
            f"Received: adapter='continue', lora={lora!r}"
        )
    if how == "stack" and lora is None:
        raise ValueError(
            "adapter='stack' puts a new adapter on the earlier one. Pass "
            "`lora=kpt.LoRA(...)`, or use adapter='continue'. Received: "
            "lora=None"
        )
    if how != "merge" and adapter.is_merged:
        raise ValueError(
            "The adapter is merged into the weights. Use adapter='merge', or "
            "call `unmerge_adapter()` of the earlier task first. Received: "
            f"adapter={how!r}"
        )
    return how


def attached(causal_lm):
    """Returns the adapters that a model's layers add, from the lowest up."""
    if family_of(causal_lm) is None:
        return ()
    calls = [layer.call for layer in linear_layers(causal_lm).values()]
    stacks = [call.adapter.stack for call in calls if hasattr(call, "adapter")]
    for kernels in expert_kernels(causal_lm).values():
        stacks += [each.func.__self__.stack for each in kernels.factors]
    return max(stacks, key=len, default=())


def check_free(causal_lm, below=None):
    """Raises a `ValueError` for a model with the adapter of another task.

    An adapter that is 0, such as that of a task whose constructor raised, is
    removed.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        below: `Adapter` that may be there, with those below it, or `None`.
    """
    known = below.stack if below else ()
    for adapter in reversed(attached(causal_lm)):
        if adapter in known:
            return
        if not adapter.is_zero or adapter.is_merged:
            raise ValueError(
                "`causal_lm` has the adapter of another task, which what "
                "this task saves would lack. Make this task from that one, "
                "`GRPOTask.from_task(task, adapter='continue')` (or 'merge' "
                "or 'stack'), or load the model again."
            )
        adapter.detach(causal_lm)


@functools.partial(
    jax.jit, static_argnames=("shape", "order", "scale", "target")
)
def _merged(kernel, a, b, *, shape, order, scale, target):
    """Adds an adapter to a kernel; on a mesh, `A @ B` is split like it."""
    with jax.default_matmul_precision("highest"):
        delta = a.astype("float32") @ b.astype("float32")
    delta = delta.reshape(shape).transpose(order) * scale
    merged = (kernel.astype("float32") + delta).astype(kernel.dtype)
    if target is None:
        return merged
    return jax.lax.with_sharding_constraint(merged, target)


def lora_from_config(config, directory):
    """Creates a `LoRA` from the content of a PEFT `adapter_config.json`."""
    return LoRA(**lora_settings(config, directory))
