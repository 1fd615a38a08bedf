"""The folder of compiled programs that test processes share."""

import pathlib

import jax
import numpy as np


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
