"""Decoder layers that differ in their weights alone.

Most layers of a model do. `Policy` traces and lowers the first of them, and
calls the result for the others, so that the first step of a deep model starts
sooner. XLA inlines the calls.
"""

import functools
import types

import jax
import keras
import numpy as np

# What an object is called, which changes nothing that it computes.
NAMES = ("name", "number")
_VALUES = (
    type(None), bool, int, float, complex, str, bytes, slice, np.dtype,
    np.generic,
)  # fmt: skip


class Calls:
    """The calls of decoder layers in one forward pass that is traced.

    Attributes:
        traced: int, the number of the layer that is traced, while it is.
        numbers: list of ints, for each call the number of the layer whose
            program it has.
    """

    def __init__(self):
        self.traced, self.numbers = None, []
        self._known = []

    def function(self, number, layer, variables, make):
        """Returns the jitted function of a layer, or of one equal to it.

        Args:
            number: int, the layer's.
            variables: list of the layer's variables, with its adapters'.
            make: function that returns the layer as a function of arrays.
        """
        for first, *known, function in self._known:
            if are_equal(known, (layer, variables)):
                self.numbers.append(first)
                return function
        compute = make()

        def decoder_layer(*arrays):
            self.traced = number
            return compute(*arrays)

        function = jax.jit(decoder_layer)
        self._known.append((number, layer, variables, function))
        self.numbers.append(number)
        return function


def are_equal(first, second):
    """Returns whether two layers compute the same of equal weights.

    Their attributes are compared, those of the layers inside them and what
    functions in the place of a `call` have closed over. Whatever is not known
    here makes a difference.

    Args:
        first, second: pairs of a layer and the list of its variables, those
            of adapters too. A variable is equal to the one that is at the
            same place in the other list.
    """
    return _Comparison(first[1], second[1]).same(first[0], second[0])


@functools.cache
def _of_every_layer():
    """The attributes that Keras sets on each layer.

    They are names, lists of what is in other attributes, and how the layer
    was built and called.
    """
    return frozenset(vars(keras.layers.Layer(name="none"))) - {"_remat_mode"}


class _Comparison:
    def __init__(self, first, second):
        self.first = {id(v): i for i, v in enumerate(first)}
        self.second = {id(v): i for i, v in enumerate(second)}
        # Those that are compared already, as what layers are made of has
        # cycles. They are kept: a later object would get the id of another.
        self.seen = {}

    def same(self, a, b):
        if type(a) is not type(b):
            return False
        if isinstance(a, keras.Variable):
            return self._same_variable(a, b)
        if a is b or (id(a), id(b)) in self.seen:
            return True
        if isinstance(a, _VALUES):
            return a == b
        self.seen[id(a), id(b)] = a, b
        return self._same_parts(a, b)

    def _same_variable(self, a, b):
        places = self.first.get(id(a)), self.second.get(id(b))
        if places == (None, None):
            return a is b
        settings = [
            (v.shape, v.dtype, v.trainable, _layout(v)) for v in (a, b)
        ]
        return places[0] == places[1] and settings[0] == settings[1]

    def _same_parts(self, a, b):
        if isinstance(a, keras.layers.Layer):
            return a.dtype_policy == b.dtype_policy and self._same_items(
                _own(a, _of_every_layer()), _own(b, _of_every_layer())
            )
        if isinstance(a, keras.initializers.Initializer):
            # Not called again: the weights have their values.
            return True
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, dict):
            return self._same_items(a, b)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        if isinstance(a, types.FunctionType):
            return a.__code__ is b.__code__ and self._same_items(
                _held(a), _held(b)
            )
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and self.same(
                a.__self__, b.__self__
            )
        if isinstance(a, functools.partial):
            return all(
                self.same(getattr(a, x), getattr(b, x))
                for x in ("func", "args", "keywords")
            )
        is_ours = type(a).__module__.startswith("keras_posttrain.")
        return (
            is_ours
            and hasattr(a, "__dict__")
            and self._same_items(_own(a, NAMES), _own(b, NAMES))
        )

    def _same_items(self, a, b):
        return a.keys() == b.keys() and all(self.same(a[k], b[k]) for k in a)


def _own(thing, without):
    """Returns the attributes of an object but some, as a dict."""
    return {k: v for k, v in vars(thing).items() if k not in without}


def _held(function):
    """Returns what a function has in addition to its code, as a dict."""
    cells = function.__closure__ or ()
    return {
        "closure": [cell.cell_contents for cell in cells],
        "defaults": function.__defaults__,
        "named": function.__kwdefaults__,
        "attributes": dict(vars(function)),
    }


def _layout(variable):
    """Returns how a variable is split, in a form that can be compared."""
    layout = getattr(variable, "_layout", None)
    if isinstance(layout, keras.distribution.TensorLayout):
        return layout.axes, layout.device_mesh
    return layout
