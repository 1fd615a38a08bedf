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

from keras_posttrain.models import device_transfer, sharding
from keras_posttrain.models.hf.adapter_files import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    lora_settings,
    module_name,
    module_names,
    open_weights,
    read_config,
)
from keras_posttrain.models.hf.tensors import Tensor, linear_layers


def _is_number(x):
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation of the linear layers of a model.

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
            `model.layers.0.self_attn.q_proj`: `"q_proj|v_proj"`.
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


class Pair:
    """An adapted layer: how its kernel's axes map to those of a matrix.

    `layer` is a built `Dense` or `EinsumDense`, `name` Hugging Face's name.
    """

    def __init__(self, name, layer):
        self.name, self.layer = name, layer
        equation = getattr(layer, "equation", "bd,do->bo")
        if "..." in equation:
            raise ValueError(f"{name}: equation {equation!r} has an ellipsis.")
        inputs, kernel, output = re.split("[,]|->", equation)
        self.in_labels = [x for x in inputs if x in kernel]
        self.out_labels = [x for x in output if x in kernel]
        size = dict(zip(kernel, layer.kernel.shape))
        self.in_shape = [size[x] for x in self.in_labels]
        self.out_shape = [size[x] for x in self.out_labels]
        flat = "".join(self.in_labels + self.out_labels)
        self.to_kernel = [flat.index(x) for x in kernel]
        self.plain_call = layer.call
        self.base = None

    @property
    def in_size(self):
        return int(np.prod(self.in_shape))

    @property
    def out_size(self):
        return int(np.prod(self.out_shape))


class Adapter(keras.layers.Layer):
    """The LoRA weights of a causal language model.

    Creating an adapter freezes the model and makes its linear layers add
    their low-rank part. The weights belong to this layer and not to the
    model's layers, so that the base stays bit-equal.
    """

    def __init__(self, causal_lm, lora, name="lora"):
        super().__init__(name=name, dtype="float32")
        self.lora = lora
        layers = linear_layers(causal_lm)
        self.pairs = [
            Pair(n, layer) for n, layer in layers.items() if lora.matches(n)
        ]
        self.names = list(layers)
        if not self.pairs:
            raise ValueError(
                "No linear layer matches `targets`; names look like "
                f"{next(iter(layers))!r}. "
                f"Received: targets={lora.targets!r}"
            )
        taken = [
            p.name for p in self.pairs if getattr(p.layer, "lora_enabled", 0)
        ]
        if taken:
            raise ValueError(
                "Keras's own LoRA is enabled on this model; it trains other "
                "matrices, which no other library reads. Load the model again "
                "and pass `lora=kpt.LoRA(...)` alone. "
                f"Received: {taken[0]!r} and {len(taken) - 1} more"
            )
        causal_lm.trainable = False
        self.a, self.b = [], []
        for pair in self.pairs:
            bound = 1 / np.sqrt(pair.in_size)
            digest = hashlib.sha256(f"{lora.seed}/{pair.name}".encode())
            seed = int.from_bytes(digest.digest()[:4], "little") >> 1
            uniform = keras.initializers.RandomUniform(
                -bound, bound, seed=seed
            )
            layouts = sharding.factor_layouts(pair)
            # `add_weight` would not let us choose the layout.
            with keras.name_scope(self.name):
                a = keras.Variable(
                    uniform,
                    shape=(pair.in_size, lora.rank),
                    dtype="float32",
                    name=f"{pair.name}.lora_a",
                    layout=layouts[0],
                )
                b = keras.Variable(
                    "zeros",
                    shape=(lora.rank, pair.out_size),
                    dtype="float32",
                    name=f"{pair.name}.lora_b",
                    layout=layouts[1],
                )
            self.a.append(a)
            self.b.append(b)
        self.built = True
        self._active = True
        self._dropout = None
        for i, pair in enumerate(self.pairs):
            pair.layer.call = self._adapted_call(i, pair)

    def _adapted_call(self, i, pair):
        def call(inputs, *args, **kwargs):
            outputs = pair.plain_call(inputs, *args, **kwargs)
            if not self._active:
                return outputs
            batch = inputs.shape[: inputs.ndim - len(pair.in_shape)]
            x = jnp.reshape(inputs, (-1, pair.in_size))
            if self._dropout is not None and self.lora.dropout:
                rate = self.lora.dropout
                keep = self._dropout.mask(i, pair.in_size, rate)
                x = jnp.where(keep, x / (1 - rate), 0)
            # On XLA's CPU backend a gradient of shape (in, rank) takes ten
            # times as long as its transpose. The barrier prevents XLA from
            # replacing one by the other.
            a = self.a[i].value.astype(x.dtype).T
            a = jax.lax.optimization_barrier(a)
            b = self.b[i].value.astype(x.dtype)
            low = jax.lax.dot_general(x, a, (((1,), (1,)), ((), ())))
            low = (low * self.lora.scale) @ b
            low = low.reshape(*batch, *pair.out_shape).astype(outputs.dtype)
            return outputs + low

        return call

    def detach(self, causal_lm):
        """Removes the adapter from the model and unfreezes it."""
        for pair in self.pairs:
            pair.layer.call = pair.plain_call
        causal_lm.trainable = True

    @contextlib.contextmanager
    def disabled(self):
        """Turns the adapter off inside the scope."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    @contextlib.contextmanager
    def dropout(self, keys):
        """Drops inputs of the adapter inside the scope, by `DropoutKeys`."""
        self._dropout = keys
        try:
            yield
        finally:
            self._dropout = None

    def merged_kernel(self, i, factors=None):
        """Computes the kernel of layer `i` of `pairs` with the adapter added.

        `factors` are arrays to use as `A` and `B` instead of the adapter's.
        The result has the kernel's shape and dtype.
        """
        pair = self.pairs[i]
        kernel = pair.layer.kernel.value
        is_split = isinstance(kernel.sharding, jax.sharding.NamedSharding)
        a, b = factors or (self.a[i].value, self.b[i].value)
        return _merged(
            kernel,
            a,
            b,
            shape=(*pair.in_shape, *pair.out_shape),
            order=tuple(pair.to_kernel),
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
            kernel = self.merged_kernel(i)
            pair.base = pair.layer.kernel.value
            pair.layer.kernel.assign(kernel)
        self._active = False

    def unmerge(self):
        """Restores the kernels that `merge` replaced, bit-equal."""
        if not self.is_merged:
            raise ValueError("The adapter is not merged: nothing to undo.")
        for pair in self.pairs:
            pair.layer.kernel.assign(pair.base)
            pair.base = None
        self._active = True

    def merged_values(self):
        """Returns a function from a variable to its value with the adapter."""
        index = {id(p.layer.kernel): i for i, p in enumerate(self.pairs)}

        def values(variable):
            if id(variable) in index and not self.is_merged:
                return self.merged_kernel(index[id(variable)])
            return variable.value

        return values

    def save(self, directory, base_name=None):
        """Writes an adapter that PEFT and vLLM load, with its base's name."""
        directory = pathlib.Path(directory)
        tensors = {}
        for tensor in self._tensors():
            array = device_transfer.to_host(tensor.variable.value)
            tensors[tensor.name] = device_transfer.contiguous(
                tensor.to_hf(array)
            )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "use_rslora": self.lora.rslora,
            "target_modules": self._target_modules(),
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

    def _tensors(self):
        """Yields the factors under PEFT's names, transposed as in PEFT."""
        transposed = ((1,), (0,))
        for pair, *factors in zip(self.pairs, self.a, self.b):
            for part, variable in zip("AB", factors):
                name = f"{PREFIX}{pair.name}.lora_{part}.weight"
                yield Tensor(name, variable, transposed)

    def _target_modules(self):
        """Returns PEFT's `target_modules`.

        These are the last parts of the names, such as `q_proj`, if all layers
        that end in them are adapted; otherwise the full names.
        """
        lasts = {p.name.rsplit(".", 1)[-1] for p in self.pairs}
        named = [n for n in self.names if n.rsplit(".", 1)[-1] in lasts]
        adapted = [p.name for p in self.pairs]
        return sorted(lasts if named == adapted else adapted)

    def load(self, directory):
        """Loads the weights of a PEFT adapter of equal rank and layers.

        If the adapter has another method, rank or set of layers, it raises a
        `ValueError` and changes no weight.
        """
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
        for tensor in self._tensors():
            with stored.open(tensor.name) as opened:
                read = functools.partial(tensor.read, opened)
                device_transfer.fill(tensor.variable, read)

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
            known = {f"{PREFIX}{name}" for name in self.names}
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
