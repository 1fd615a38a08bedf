"""The order of a dataset's rows, and whose order a saved position is of."""

import functools

import grain
import numpy as np

# Orders of at most so many numbers are made at once and kept: all of one take
# 50 ms, since Grain permutes numbers of 16 bits until one is below the size.
FEW = 512


def shuffled(size, shuffle, seed, stream):
    """Returns the numbers below `size` in the order in which rows are read.

    It is a Grain `MapDataset`, or an array of few numbers. Each `stream`, such
    as an epoch, has another order; without `shuffle` numbers ascend.
    """
    if size <= FEW:
        return indices(size, shuffle, seed, stream)
    numbers = grain.MapDataset.range(size)
    return numbers.shuffle(seed=_seed(seed, stream)) if shuffle else numbers


def indices(size, shuffle, seed, stream):
    """Returns all numbers of `shuffled` as an int64 array, in less time.

    It is read-only if it is shuffled.
    """
    if not shuffle or size < 2:
        return np.arange(size)
    permuted = _few_permuted if size <= FEW else _permuted
    return permuted(size, _seed(seed, stream))


def _permuted(size, seed):
    place = functools.partial(
        grain.experimental.index_shuffle,
        max_index=size - 1,
        seed=seed,
        rounds=4,
    )
    found = np.fromiter(map(place, range(size)), np.int64, size)
    found.flags.writeable = False
    return found


_few_permuted = functools.lru_cache(maxsize=1024)(_permuted)


def _seed(seed, stream):
    seeds = np.random.SeedSequence([seed % 2**32, stream])
    return int(seeds.generate_state(1)[0])


def check_same(ours, theirs):
    """Raises where a position's fingerprint differs from that of the data."""
    names = sorted({*ours, *theirs})
    differing = [k for k in names if ours.get(k) != theirs.get(k)]
    if differing:
        there = ", ".join(f"{k}={theirs.get(k)!r}" for k in differing)
        here = ", ".join(f"{k}={ours.get(k)!r}" for k in differing)
        raise ValueError(
            "A position in the data can only be used with the same data "
            f"and settings. Received: a state of {there}, data of "
            f"{here}. Use the data and arguments of the run that saved "
            "it, or start a new run directory."
        )
