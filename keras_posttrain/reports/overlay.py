"""One page on several runs."""

import collections.abc
import contextlib
import json
import os
import pathlib

from keras_posttrain import _remote
from keras_posttrain.reports import page
from keras_posttrain.reports.curves import Curves
from keras_posttrain.reports.diagnoses import Diagnoses
from keras_posttrain.reports.encoding import encode

PAGE, LOG = "report.html", "metrics.jsonl"


def report(runs, path):
    """Writes a page on one or several runs, with their curves in one plot.

    Args:
        runs: list of directories or addresses that runs wrote to with
            `kpt.callbacks.Report`, or else with `kpt.callbacks.MetricsLog`
            (the page then has curves and diagnoses alone), or of pages; a
            dict of these by name; or one of them.
        path: str or path of the page to write, such as `"both.html"`.

    Returns:
        The page's path.

    Raises:
        ValueError: for a directory without either file, or a page that
            `Report` did not write.

    Example:

    ```python
    for name in ("a", "b"):
        report = kpt.callbacks.Report(f"runs/{name}")
        task.fit(rows, verbose=0, callbacks=[report])
    kpt.report({"first": "runs/a", "second": "runs/b"}, "both.html")
    ```
    """
    _remote.need_local("path", path)
    if isinstance(runs, (str, os.PathLike)):
        runs = [runs]
    if not isinstance(runs, collections.abc.Mapping):
        runs = {_name(run): run for run in runs}
    if not runs:
        raise ValueError(
            "`runs` must name at least one run. Received: runs=[]"
        )
    found = []
    for name, run in runs.items():
        for data in _read(_found(run)):
            found.append(encode(data | {"name": data.get("name") or name}))
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.write(path, page.render(found))
    return path


def has_run(folder):
    """Returns whether a directory has what `report` reads."""
    return any((pathlib.Path(folder) / name).exists() for name in (PAGE, LOG))


def _name(run):
    return (
        os.fspath(run) if _remote.is_address(run) else str(pathlib.Path(run))
    )


def _found(run):
    """Returns the path of a page or of a run's directory."""
    if not _remote.is_address(run):
        return pathlib.Path(run)
    address = os.fspath(run).rstrip("/")
    for file in (address, f"{address}/{PAGE}", f"{address}/{LOG}"):
        # Of a directory nothing else is copied.
        if file.endswith((".html", LOG)):
            with contextlib.suppress(FileNotFoundError):
                return _remote.local_copy(file)
    raise ValueError(
        f"A run's directory must have a {PAGE!r} of `kpt.callbacks.Report` or "
        f"a {LOG!r} of `kpt.callbacks.MetricsLog`. Received: {address!r}"
    )


def _read(path):
    """Returns the runs of a page or of a directory, a list of dicts."""
    if path.is_file():
        return [_of_log(path)] if path.name == LOG else page.read(path)
    if (path / PAGE).exists():
        return page.read(path / PAGE)
    if (path / LOG).exists():
        return [_of_log(path / LOG)]
    raise ValueError(
        f"A run's directory must have a {PAGE!r} of `kpt.callbacks.Report` or "
        f"a {LOG!r} of `kpt.callbacks.MetricsLog`. "
        f"Received: {str(path)!r}"
    )


def _of_log(path):
    """Returns what a log of metrics tells of a run."""
    curves, diagnoses, step = Curves(), Diagnoses(), 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
                step = row.pop("step")
            except (ValueError, KeyError):
                # A line that a crash has cut off.
                continue
            values = {k: float("nan") if v is None else v
                      for k, v in row.items()}  # fmt: skip
            curves.add(step, 0.0, values)
            diagnoses.add(step, values)
    written = path.stat().st_mtime
    nothing = {"names": [], "stride": 1, "rows": []}
    return {
        "about": {
            "status": "log", "step": step, "started": written,
            "written": written, "every": 0,
        },
        "environment": {},
        "diagnoses": diagnoses.data(),
        "curves": json.loads(curves.text()),
        "validation": nothing,
        "samples": {"kept": [], "seen": 0, "skipped": 0, "words": {}},
        "timeline": None,
        "memory": None,
        "data": None,
    }  # fmt: skip
