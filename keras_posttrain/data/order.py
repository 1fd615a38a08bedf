"""The order of a dataset's rows, and whose order a saved position is of."""

import grain
import numpy as np


def shuffled(size, shuffle, seed, stream):
    """Returns the numbers below `size` in the order in which rows are read.

    It is a Grain `MapDataset`. Each `stream`, such as an epoch, has another
    order; without `shuffle` numbers ascend.
    """
    numbers = grain.MapDataset.range(size)
    if not shuffle:
        return numbers
    seeds = np.random.SeedSequence([seed % 2**32, stream])
    return numbers.shuffle(seed=int(seeds.generate_state(1)[0]))


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
