"""Runs a function over a grid of settings."""

import collections.abc
import gc
import json
import math
import pathlib
import shutil
import traceback

import jax
import keras

from keras_posttrain import _console, _remote
from keras_posttrain.callbacks.directories import (
    check_name,
    lock,
    make_directory,
    unlock,
)
from keras_posttrain.distribution import processes
from keras_posttrain.reports import overlay, page
from keras_posttrain.sweeps import grid as grids
from keras_posttrain.sweeps.results import DONE, FAILED, SweepResults
from keras_posttrain.training import checks

RESULT = "result.json"
# Of these, two alike in a row are a mistake in the script.
MISTAKES = (ValueError, TypeError, NameError, AttributeError, LookupError,
            ImportError)  # fmt: skip


def sweep(function, grid, directory, *, num_samples=None, seed=0, verbose=1):
    """Runs a function over a grid of settings, one point after another.

    A call that was interrupted or killed is resumed by the same call: points
    that are finished are not run again, and the unfinished one resumes where
    its `kpt.callbacks.Checkpoint` was. The table is that of a sweep that was
    not interrupted. Points that were added to the grid are run; those that
    were removed stay on the disk and are no rows of the table. A point that
    has failed is recorded, the others are run, and the next call tries it
    again. If two points in a row raise the same error, such as a
    `ValueError`, it is taken for a mistake of the script and raised.

    Random seeds are set before each point, so that its result depends on no
    other point, and compiled programs are freed after it.

    In `directory` each point has a folder with `result.json` and what the
    function writes. `table.md`, `table.csv` and, where runs have a
    `MetricsLog` or a `Report`, `sweep.html` with their curves in one plot are
    written after each point.

    Args:
        function: called by name with the settings of a point and with
            `folder`, its `pathlib.Path`. It makes a task, fits it with a
            `kpt.callbacks.Checkpoint(folder)`, and returns a dict of numbers
            by name, such as `task.evaluate(rows)`, or the `History` of
            `fit`, whose last epoch is taken. Of what it computes only this is
            kept.
        grid: dict from the names of settings to lists of values: strings,
            numbers, bools or `None`. A dict in the place of a list gives
            names to other values, such as
            `{"loss": {"dpo": kpt.losses.DPOLoss()}}`.
        directory: str or path, created if missing.
        num_samples: int or `None`: run only a random choice of so many
            points, which depends on `seed` and on the grid.
        seed: int, for `keras.utils.set_random_seed` before each point.
        verbose: 0 prints nothing, of `fit` neither; 1 prints a line for each
            point, and what the function prints.

    Returns:
        The table, a `SweepResults` with `rows`, `best(metric)`,
        `mean_over(setting)`, `to_csv()` and `to_markdown()`.

    Raises:
        ValueError: for a grid or a function that does not fit it, before
            anything is run; for a function that returns no metrics; if
            another process sweeps in the same directory, or if there are
            several processes.

    A point whose result is from another version of the function, by the text
    of its source, is reported and not run again: delete its folder for that.
    Changes of what the function calls or of data are not seen.

    Example:

    ```python
    def run(learning_rate, rank, folder):
        task = kpt.SFTTask.from_preset(preset, lora=kpt.LoRA(rank=rank))
        task.compile(optimizer=keras.optimizers.AdamW(learning_rate))
        task.fit(rows, callbacks=[
            kpt.callbacks.Checkpoint(folder), kpt.callbacks.MetricsLog(folder)
        ])
        return task.evaluate(held_out)

    grid = {"learning_rate": [1e-4, 3e-4], "rank": [8]}
    table = kpt.sweep(run, grid, "sweep/")
    print(table)
    print(table.best("loss")["settings"])
    ```
    """
    checks.seed(seed)
    points = grids.make_points(grid, num_samples, seed)
    grids.check_function(function, list(grid))
    _remote.need_local("directory", check_name(directory))
    directory = pathlib.Path(directory).absolute()
    if processes.count() > 1:
        raise ValueError(
            "A sweep is run by one process. Received: "
            f"{processes.count()} processes. Start it on one host."
        )
    make_directory(directory)
    lock(directory)
    try:
        with _console.silenced(not verbose):
            return _Sweep(function, points, directory, seed).run()
    finally:
        unlock(directory)


class _Sweep:
    """One call of `sweep`."""

    def __init__(self, function, points, directory, seed):
        self.function, self.points = function, points
        self.directory, self.seed = directory, seed
        self.version = grids.fingerprint(function)
        self.found = {p.folder: _read(directory / p.folder) for p in points}

    def run(self):
        self._say_what_is_there()
        last = None
        for number, point in enumerate(self.points, 1):
            found = self.found[point.folder]
            if found is not None and found["status"] == DONE:
                continue
            _console.say(
                f"Point {number} of {len(self.points)}: {point.title}"
            )
            error = self._run_point(point)
            self._write_tables()
            if error is not None and _same(last, error):
                error.add_note(
                    "Two points in a row have failed with this error, so the "
                    "sweep has ended. Repair the script and run it again."
                )
                raise error
            last = error
        self._write_tables()
        return self.table()

    def _say_what_is_there(self):
        done = [f for f in self.found.values() if f and f["status"] == DONE]
        if done:
            _console.say(
                f"{len(done)} of {len(self.points)} points are finished."
            )
        old = [f for f in done if self.version not in (None, f["function"])]
        if old:
            _console.say(
                f"{len(old)} of them are results of another version of the "
                "function. To run a point again, delete its folder."
            )

    def _run_point(self, point):
        """Runs a point, writes its result, and returns its error or `None`."""
        folder = self.directory / point.folder
        metrics, error = {}, None
        try:
            metrics = self._metrics(point, folder)
        except Exception as raised:  # noqa: BLE001 - the others are run
            error = raised
            # Its frames hold the model.
            text = traceback.format_exc()
            traceback.clear_frames(error.__traceback__)
            _console.say(f"{text}The point has failed: {point.title}")
        _free()
        result = {
            "settings": point.settings,
            "status": DONE if error is None else FAILED,
            "metrics": metrics,
            "error": error and f"{type(error).__name__}: {error}",
            "function": self.version,
        }
        make_directory(folder)
        page.write(folder / RESULT, json.dumps(result, indent=2) + "\n")
        self.found[point.folder] = result
        return error

    def _metrics(self, point, folder):
        """Calls the function and returns its metrics."""
        found = self._call(point, folder)
        if isinstance(found, keras.callbacks.History) and not found.history:
            # Killed between the end of the run and its result: the logs of
            # its epochs are lost.
            shutil.rmtree(folder)
            found = self._call(point, folder)
        return _as_metrics(found)

    def _call(self, point, folder):
        make_directory(folder)
        keras.utils.set_random_seed(self.seed)
        return self.function(**point.arguments, folder=folder)

    def table(self):
        rows = []
        for point in self.points:
            found = self.found[point.folder]
            if found is not None:
                metrics = {
                    name: math.nan if value is None else value
                    for name, value in found["metrics"].items()
                }
                rows.append(
                    {
                        "settings": point.settings,
                        "metrics": metrics,
                        "count": int(found["status"] == DONE),
                        "status": found["status"],
                        "error": found["error"],
                        "folder": self.directory / point.folder,
                    }
                )
        return SweepResults(rows)

    def _write_tables(self):
        table = self.table()
        page.write(self.directory / "table.md", table.to_markdown())
        page.write(self.directory / "table.csv", table.to_csv())
        runs = {
            point.title: self.directory / point.folder
            for point in self.points
            if overlay.has_run(self.directory / point.folder)
        }
        if runs:
            overlay.report(runs, self.directory / "sweep.html")


def _read(folder):
    """Returns the result of a point, or `None` where there is none."""
    try:
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _as_metrics(found):
    """Returns what a function has returned as a dict for JSON."""
    if isinstance(found, keras.callbacks.History):
        found = {name: values[-1] for name, values in found.history.items()}
    try:
        if not isinstance(found, collections.abc.Mapping) or not found:
            raise TypeError
        values = {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError):
        raise ValueError(
            "The function of a sweep must return a dict of numbers by name, "
            "such as that of `task.evaluate`, or the History of `fit`. "
            f"Received: {found!r:.200}"
        ) from None
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


def _same(last, error):
    """Returns whether two errors are one mistake of the script."""
    return isinstance(error, MISTAKES) and repr(last) == repr(error)


def _free():
    """Frees what a point has held: models, and its compiled programs."""
    gc.collect()
    jax.clear_caches()
