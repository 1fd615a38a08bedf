"""Models that have shapes and no values: a plan allocates nothing."""

import contextlib

import jax
import keras


@contextlib.contextmanager
def shapes_only():
    """Makes variables that have a shape and a dtype, and no memory.

    A task that is made inside can be compiled and planned, inside or
    afterwards, and neither trained nor sampled from: its variables' values
    are `jax.ShapeDtypeStruct`s. A directory that has a `config.json` alone
    will do.

    Example:

    ```python
    with kpt.distribution.shapes_only():
        task = kpt.SFTTask.from_preset("llama3_8b_en", load_weights=False)
    task.compile()
    print(task.plan("v5e:4x4", batch_size=16))
    ```
    """
    plain, made = keras.Variable._initialize_with_initializer, []

    def defer(variable, initializer):
        # As Keras does in a stateless scope, where it cannot make the
        # optimizer that every KerasHub model comes with: while a model is
        # built, its layers are traced with what the initializers give.
        variable._initialize_layout()
        variable._value, variable._initializer = None, initializer
        made.append(variable)

    keras.Variable._initialize_with_initializer = defer
    try:
        yield
    finally:
        keras.Variable._initialize_with_initializer = plain
        for variable in made:
            variable._value = jax.ShapeDtypeStruct(
                variable.shape, variable.dtype
            )
            variable._initializer = None
