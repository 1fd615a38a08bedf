"""Tensor parallelism of decoder layers that states what it sends.

A layer's first products have their columns split over the mesh's model axis,
those that follow their rows
([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)). Between them the
tokens are split, so that norms, residuals and what is kept for the backward
pass are divided as well
([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198)): tokens are
gathered before the first products, and sums are scattered after the last.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain.models import experts, linear, sharding


@dataclasses.dataclass(frozen=True)
class TokenLayouts:
    """Layouts of an array whose first axis is that of tokens.

    Attributes:
        split: tokens over all devices.
        whole: tokens over the axis of rows alone.
        copies: as `whole`, after an axis of `size` copies, one for each device
            along the model axis.
        size: int, the devices along the model axis.
        model: str, its name.
    """

    split: NamedSharding
    whole: NamedSharding
    copies: NamedSharding
    size: int
    model: str

    def by_columns(self, x, axis):
        """Splits tokens over rows alone, and another axis over the model's."""
        mesh, rows = self.whole.mesh, self.whole.spec[0]
        spec = P(rows, *[None] * (axis - 1), self.model)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def layouts_of(tokens):
    """Returns the `TokenLayouts` of so many tokens, or `None`.

    There are none without a model axis, or if its size and that of the rows'
    axis do not divide the tokens.
    """
    mesh, rows, data, model, size = sharding.axes()
    if size == 1 or tokens % (data * size):
        return None
    names = rows if isinstance(rows, tuple) else (rows,)
    return TokenLayouts(
        split=NamedSharding(mesh, P((*names, model))),
        whole=NamedSharding(mesh, P(rows)),
        copies=NamedSharding(mesh, P(model, rows)),
        size=size,
        model=model,
    )


def layouts_for(layer, tokens):
    """Returns the `TokenLayouts` of a decoder layer's tokens, or `None`.

    Experts exchange tokens by themselves, and codes are multiplied elsewhere.
    """
    layouts = layouts_of(tokens)
    if layouts is None or experts.is_recorded(layer):
        return None
    summed = sharding.layers_with_summed_outputs(layer)
    products = filter(linear.is_linear, linear.sublayers(layer))
    every = all(map(linear.is_flat, (*products, *summed)))
    return layouts if summed and every else None


def shards(policy, tokens):
    """Returns into how many parts the model axis splits all layers' tokens.

    `tokens` is the number of those that pass through the model at once.
    """
    found = [layouts_for(layer, tokens) for layer in policy.layers]
    return found[0].size if policy.packable and all(found) else 1


@contextlib.contextmanager
def split_products(layouts):
    """Computes linear layers inside on tokens that are split.

    `layouts` are `TokenLayouts`, or `None` to change nothing.
    """
    if layouts is None:
        yield
        return
    with linear.products_by(_Products(layouts)):
        yield


class _Products(linear.Products):
    """The products of one call of a decoder layer, see `products_by`."""

    def __init__(self, layouts):
        self._layouts = layouts
        self._copied = []

    def multiply(self, layer, equation, inputs, kernel):
        x = jnp.squeeze(inputs, 1)
        axis = self._axis(layer)
        if axis is None:
            return linear.multiply(equation, x, kernel)
        kernels = self._parts(kernel, axis)
        product = jax.vmap(functools.partial(linear.multiply, equation))
        inside, labels, outside = re.split(",|->", equation)
        if labels[axis] in inside:
            parts = self._parts(x, inside.index(labels[axis]))
            return _summed(self._layouts, product(parts, kernels))
        out = product(self._copies(inputs, x), kernels)
        place = outside.index(labels[axis])
        shape = out.shape[1:]
        out = jnp.moveaxis(out, 0, place)
        out = out.reshape(*shape[:place], -1, *shape[place + 1 :])
        return self._layouts.by_columns(out, place)

    def low_rank(self, layer, x, a, b, scale):
        axis, layouts = self._axis(layer), self._layouts
        if axis is None:
            return super().low_rank(layer, x, a, b, scale)
        inside, labels, _ = re.split(",|->", linear.equation_of(layer))
        laid = jax.lax.with_sharding_constraint
        # Where tokens are split, so is the product.
        if labels[axis] in inside:
            low = jnp.matmul(x, a.T)
            low = laid(laid(low, layouts.whole), layouts.split)
            return _on_own_tokens(layouts, low * scale, b)
        low = _on_own_tokens(layouts, x, a.T)
        low = laid(laid(low, layouts.split), layouts.whole)
        return (low * scale) @ b

    def _axis(self, layer):
        """Returns the axis of a kernel that divides the work, or `None`."""
        split, model = sharding.split_of(layer.kernel), self._layouts.model
        if model not in split.axes or model in split.to_save_memory:
            return None
        return split.axes.index(model)

    def _copies(self, inputs, x):
        """Gathers tokens, once for all layers that have the same inputs."""
        for known, copies in self._copied:
            if known is inputs:
                return copies
        copies = _gathered(self._layouts, x)
        self._copied.append((inputs, copies))
        return copies

    def _parts(self, x, axis):
        """Splits an axis into a first one of devices and the rest."""
        size, shape = self._layouts.size, x.shape
        parts = (size, shape[axis] // size)
        x = x.reshape(*shape[:axis], *parts, *shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)


def _on_own_tokens(layouts, x, factor):
    """Multiplies split tokens by a factor that each device has whole.

    XLA would compute the factor's gradient from all tokens on each device.
    Here devices sum it over their own tokens before they exchange it.
    """
    dtype = x.dtype
    if sharding.platform() == "cpu":
        # XLA's backend for CPUs cannot add up bfloat16.
        factor = factor.astype("float32")
    return sharding.on_devices(
        lambda x, factor: x @ factor.astype(dtype),
        layouts.split.mesh,
        (layouts.split.spec, P()),
        layouts.split.spec,
    )(x, factor)


def _gather(layouts, x):
    x = jax.lax.with_sharding_constraint(x, layouts.whole)
    copies = jnp.broadcast_to(x, (layouts.size, *x.shape))
    return jax.lax.with_sharding_constraint(copies, layouts.copies)


def _scatter(layouts, copies):
    copies = jax.lax.with_sharding_constraint(copies, layouts.copies)
    total = copies.sum(axis=0)
    return jax.lax.with_sharding_constraint(total, layouts.split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layouts, x):
    """Gathers split tokens into a copy for each device of the model axis.

    The gradients of the products with a copy are added up on its device
    before they are summed over devices: of gradients with respect to one
    array XLA would sum each over devices, and then add them up.
    """
    return _gather(layouts, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(layouts, copies):
    """Sums `(devices, tokens, ...)` over devices, each its share of tokens."""
    return _scatter(layouts, copies)


# Each is the other's gradient.
_gathered.defvjp(
    lambda layouts, x: (_gather(layouts, x), None),
    lambda layouts, _, copies: (_scatter(layouts, copies),),
)
_summed.defvjp(
    lambda layouts, copies: (_scatter(layouts, copies), None),
    lambda layouts, _, x: (_gather(layouts, x),),
)
