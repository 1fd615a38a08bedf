"""AdamW whose moments take a byte each."""

import functools
import math

import jax
import jax.numpy as jnp
import keras

# Numbers along the last axis that share a scale.
BLOCK = 256
# Variables with fewer numbers have float32 moments.
LEAST = 4096


class AdamW8bit(keras.optimizers.AdamW):
    """AdamW with block-wise 8-bit moments: a quarter of its memory.

    The first moment is stored as the sign and the square root of its share of
    the largest in its block of up to 256 numbers, the second as the fourth
    root of its share, each in 8 bits. Rounding is stochastic: an average that
    moves by 0.1% a step would never change otherwise. Its random numbers
    depend on the step and the place in the variable alone, so equal runs are
    equal, however they are split over devices. Variables of fewer than 4,096
    numbers keep float32 moments.

    Args:
        **kwargs: as of `keras.optimizers.AdamW`, without `amsgrad`.

    Raises:
        ValueError: for `amsgrad=True`.

    Example:

    ```python
    task = kpt.SFTTask.from_preset("qwen3_0.6b_en", dtype="bfloat16")
    task.compile(optimizer=kpt.AdamW8bit(1e-5))
    ```

    Reference:
        - [Dettmers et al., 2022](https://arxiv.org/abs/2110.02861), which
          stores both moments block-wise in 8 bits.
    """

    def __init__(self, learning_rate=0.001, **kwargs):
        kwargs.setdefault("name", "adamw_8bit")
        if kwargs.get("amsgrad"):
            raise ValueError(
                "`AdamW8bit` has no largest second moment. Use "
                "`keras.optimizers.AdamW(amsgrad=True)`. Received: "
                "amsgrad=True"
            )
        super().__init__(learning_rate, **kwargs)

    def build(self, variables):
        if self.built:
            return
        keras.optimizers.Optimizer.build(self, variables)
        self._moments = []
        for variable in variables:
            parts = [(name, None) for name in ("momentum", "velocity")]
            if math.prod(variable.shape) >= LEAST:
                parts = [("momentum", "int8"), ("velocity", "uint8")]
            self._moments.append(
                [self._moment(variable, *part) for part in parts]
            )

    def _moment(self, variable, name, dtype):
        """Returns the variables of a moment: floats, or codes and scales."""
        if dtype is None:
            return [self.add_variable_from_reference(variable, name)]
        name = f"{variable.path.replace('/', '_')}_{name}"
        layout = getattr(variable, "_layout", None)
        shape = tuple(variable.shape)
        blocks = (*shape[:-1], shape[-1] // _block(shape))
        return [
            self.add_variable(shape, "zeros", dtype, name=name, layout=layout),
            self.add_variable(
                blocks,
                "zeros",
                "float32",
                name=f"{name}_scale",
                layout=_fitting(layout, blocks),
            ),
        ]

    def update_step(self, gradient, variable, learning_rate):
        gradient = jnp.asarray(gradient, "float32")
        step = jnp.asarray(self.iterations.value, "float32") + 1
        momentum, velocity = self._moments[self._get_variable_index(variable)]
        m, v = _read(momentum, 2), _read(velocity, 4)
        m = m + (gradient - m) * (1 - self.beta_1)
        v = v + (jnp.square(gradient) - v) * (1 - self.beta_2)
        rate = learning_rate * jnp.sqrt(1 - self.beta_2**step)
        rate = rate / (1 - self.beta_1**step)
        change = rate * m / (jnp.sqrt(v) + self.epsilon)
        self.assign_sub(variable, jnp.asarray(change, variable.dtype))
        self._write(momentum, m, 2)
        self._write(velocity, v, 4)

    def _write(self, moment, values, root):
        if len(moment) == 1:
            self.assign(moment[0], values)
            return
        codes, scale = moment
        seed = jnp.asarray(self.iterations.value, "uint32") * 2 + (root == 4)
        arrays = encode(values, root, seed)
        for variable, array in zip((codes, scale), arrays):
            self.assign(variable, array)


def _read(moment, root):
    values = [variable.value for variable in moment]
    return values[0] if len(values) == 1 else decode(*values, root)


def _block(shape):
    """Returns the largest block that divides the last axis."""
    size = shape[-1]
    fits = (n for n in range(min(BLOCK, size), 0, -1) if size % n == 0)
    return next(fits)


def _fitting(layout, shape):
    """Returns the layout of scales: that of the codes where it divides."""
    if layout is None:
        return None
    mesh = layout.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape))

    def devices(axis):
        axes = axis if isinstance(axis, tuple) else (axis,)
        return math.prod(sizes[x] for x in axes)

    axes = [
        axis if axis is not None and size % devices(axis) == 0 else None
        for axis, size in zip(layout.axes, shape)
    ]
    return keras.distribution.TensorLayout(axes, mesh)


def encode(values, root, seed):
    """Rounds numbers to 8 bits by blocks of their last axis.

    Args:
        values: float32 array; not negative if `root` is 4.
        root: int, 2 for int8 codes with a sign, 4 for uint8 codes.
        seed: uint32 scalar.

    Returns:
        `(codes, scales)`: an array of the shape of `values`, and the largest
        magnitude of each block.
    """
    shape = values.shape
    blocks = values.reshape(*shape[:-1], -1, _block(shape))
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    share = jnp.abs(blocks) / jnp.where(scale == 0, 1, scale)[..., None]
    most = 127 if root == 2 else 255
    share = jnp.sqrt(share) if root == 2 else jnp.sqrt(jnp.sqrt(share))
    share = share.reshape(shape)
    codes = jnp.floor(share * most + _noise(shape, seed))
    codes = jnp.clip(codes, 0, most)
    if root == 4:
        # A root of 0 would divide by `epsilon` alone.
        codes = jnp.where(share > 0, jnp.maximum(codes, 1), 0)
        return codes.astype("uint8"), scale
    return (codes * jnp.sign(values)).astype("int8"), scale


def decode(codes, scale, root):
    """Computes the numbers that `encode` stored."""
    shape = codes.shape
    share = codes.astype("float32") / (127 if root == 2 else 255)
    share = share * jnp.abs(share) if root == 2 else share**4
    blocks = share.reshape(*scale.shape, -1) * scale[..., None]
    return blocks.reshape(shape)


def _noise(shape, seed):
    """Returns numbers in [0, 1) that hang on `seed` and the place alone.

    They are a hash of 32 bits, `lowbias32` of Wellons's hash prospector.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    place = functools.reduce(
        jnp.add,
        (
            jax.lax.broadcasted_iota("uint32", shape, i)
            * jnp.uint32(stride % 2**32)
            for i, stride in enumerate(strides)
        ),
    )
    x = place ^ (seed * jnp.uint32(0x9E3779B9))
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return ((x ^ (x >> 16)) >> 8).astype("float32") / 2**24
