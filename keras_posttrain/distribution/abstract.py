"""Models that have shapes and no values: a plan allocates nothing."""

import contextlib

import jax

from keras_posttrain._variables import without_values


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
    with without_values() as made:
        try:
            yield
        finally:
            for variable in made:
                variable._value = jax.ShapeDtypeStruct(
                    variable.shape, variable.dtype
                )
                variable._initializer = None
