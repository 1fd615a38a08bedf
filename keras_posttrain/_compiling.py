"""Compiles programs of a long run before they are needed."""

import concurrent.futures

# Rollouts after which a run compiles, and those of a long run.
AFTER = 2
LONG_RUN = 200


def is_ahead(setting, rollouts):
    """Returns whether a run compiles programs before it needs them.

    Args:
        setting: bool, or `"auto"` for long runs only.
        rollouts: int, those of the run, or `None` where it is not known.
    """
    if setting != "auto":
        return setting
    return rollouts is None or rollouts >= LONG_RUN


def compile_all(lowered):
    """Compiles programs in several threads while others are lowered.

    Args:
        lowered: iterable of `jax.stages.Lowered`. A call of the jitted
            function with arguments of the same kind finds the program.

    Returns:
        int, the number of programs.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(program.compile) for program in lowered]
        for job in jobs:
            job.result()
    return len(jobs)
