"""Compiles programs of a long run before they are needed."""

import concurrent.futures
import time

from keras_posttrain import _console

# Rollouts after which a run compiles, or the number of the step on rows before
# which it does; those of a long run; and those after which a stream is taken
# for one.
AFTER = 2
LONG_RUN = 200
LONG_STREAM = 20


def is_due(setting, rollouts, done):
    """Returns whether a run compiles programs of all lengths now.

    Args:
        setting: bool, or `"auto"` for long runs only.
        rollouts: int, those of the run, or its steps on rows; `None` where
            it is not known.
        done: int, how many are done; of steps on rows with the next one.
    """
    if setting != "auto":
        return setting and done == AFTER
    if rollouts is None:
        return done == LONG_STREAM
    return rollouts >= LONG_RUN and done == AFTER


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


def compile_shapes(lowered, count, is_shown):
    """Compiles a step for other shapes of batches, and says so.

    Args:
        lowered: as in `compile_all`.
        count: int, the shapes.
        is_shown: bool, whether it is printed.
    """
    if is_shown:
        _console.say(
            f"fit: compiling the programs for {count} other shapes of batches "
            "(`compile_ahead`) ..."
        )
    start = time.perf_counter()
    programs = compile_all(lowered)
    if is_shown:
        _console.say(
            f"fit: compiled {programs} programs for batches of other shapes "
            f"in {time.perf_counter() - start:.0f} s"
        )
