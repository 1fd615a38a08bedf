"""Variables of Keras: without a value yet, and removed from a layer."""

import contextlib
import threading

import jax
import keras

# Keras's own method, which calls a variable's initializer. It is replaced
# while a thread defers initialization; each thread has its own list.
_initialize = keras.Variable._initialize_with_initializer
_deferring, _lock = threading.local(), threading.Lock()
_num_scopes = 0


@contextlib.contextmanager
def without_values():
    """Defers the initialization of variables that this thread makes inside.

    Keras defers it in a stateless scope only, which makes no optimizer,
    knows no layouts and initializes such a variable at the next chance.
    Therefore a method of Keras is replaced here; a test pins it.

    Yields:
        A list, to which each variable made inside is appended. Each must be
        given a value before it is used.
    """
    outer, made = getattr(_deferring, "made", None), []
    _count(+1)
    _deferring.made = made
    try:
        yield made
    finally:
        _deferring.made = outer
        _count(-1)


def _count(change):
    """Counts open scopes; the last to close restores Keras's method."""
    global _num_scopes
    with _lock:
        _num_scopes += change
        method = _defer if _num_scopes else _initialize
        keras.Variable._initialize_with_initializer = method


def _defer(variable, initializer):
    made = getattr(_deferring, "made", None)
    if made is None:
        # Another thread defers, this one does not.
        _initialize(variable, initializer)
        return
    variable._initialize_layout()
    # While a model is built, its layers are traced with what the
    # initializers would return.
    variable._value, variable._initializer = None, initializer
    made.append(variable)


@contextlib.contextmanager
def shapes_only():
    """Makes variables that have a shape and a dtype, and use no memory.

    A task that is made inside can be compiled and planned, inside or
    afterwards, but neither trained nor sampled from: its variables' values
    are `jax.ShapeDtypeStruct`s. A directory that has only a `config.json`
    is enough.

    Example:

    ```python
    with kpt.distribution.shapes_only():
        task = kpt.SFTTask.from_preset("llama3_8b_en", load_weights=False)
    task.compile()
    print(task.plan("cpu:8", batch_size=8))
    ```
    """
    with without_values() as made:
        try:
            yield
        finally:
            for variable in made:
                variable._value = jax.ShapeDtypeStruct(
                    variable.shape, variable.dtype
                )
                variable._initializer = None


def remove(layer, name):
    """Removes a variable from a layer.

    Keras's `__delattr__` does this too, and then collects garbage, which
    takes a second in a large process.
    """
    layer._untrack_variable(getattr(layer, name))
    del vars(layer)[name]
