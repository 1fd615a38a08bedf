"""The folder of compiled programs that test processes share."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.training import run_state


def program():
    """The same program, each time not yet known to this process."""

    def a_program_of_this_test(x):
        return 3 * x + 1

    return jax.jit(a_program_of_this_test)


def test_a_damaged_program_is_compiled_again():
    """One that is read half written, or that a killed process left."""
    folder = pathlib.Path(jax.config.jax_compilation_cache_dir)

    def kept():
        return list(folder.glob("jit_a_program_of_this_test-*-cache"))

    x = np.arange(4.0, dtype="float32")
    try:
        program()(x)
        [path] = kept()
        whole = path.read_bytes()
        for size in (0, len(whole) // 2):
            path.write_bytes(whole[:size])
            np.testing.assert_array_equal(program()(x), 3 * x + 1)
    finally:
        for path in kept():
            path.unlink()


def test_one_program_checks_all_weights_of_the_same_shapes():
    values = [jnp.ones((3, 5)), jnp.ones((3, 5))]
    first = run_state.weights_digest(values)
    programs = run_state._digest._cache_size()
    # In order: what is swapped is other weights.
    others = [values[0] + 1, values[1]], [values[0], values[1] + 1]
    found = {first, *map(run_state.weights_digest, others)}
    assert len(found) == 3
    assert run_state._digest._cache_size() == programs
