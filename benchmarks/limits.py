"""The machine's limits: its fastest float32 product, and its fastest read."""

import concurrent.futures
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import report

SIZES = (1024, 2048, 3072)
# Far more than caches hold.
READ = 2**27
REPEATS = 8


def fastest(function):
    """Returns the fewest seconds of a call, after a first one."""
    function()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def operations_per_s():
    """Returns the rate of the fastest product, by XLA or by NumPy's BLAS."""
    return max(2 * size**3 / product_s(size) for size in SIZES)


def product_s(size):
    """Returns the fewest seconds of a product of square matrices."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal((size, size), np.float32)
    product, same, out = jax.jit(jnp.matmul), jnp.asarray(one), one.copy()
    return min(
        fastest(lambda: product(same, same).block_until_ready()),
        fastest(lambda: np.matmul(one, one, out=out)),
    )


def bytes_per_s():
    """Returns the rate at which all cores read memory."""
    numbers = np.ones(READ, np.float32)
    same, total = jnp.asarray(numbers), jax.jit(jnp.sum)
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(numbers, cores)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        seconds = min(
            fastest(lambda: total(same).block_until_ready()),
            fastest(lambda: list(pool.map(np.sum, parts))),
        )
    return numbers.nbytes / seconds


if __name__ == "__main__":
    report.imports_done()
    report.result(
        ("jax", "numpy"),
        operations_per_s=operations_per_s(),
        bytes_per_s=bytes_per_s(),
    )
