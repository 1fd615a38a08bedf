"""The options of a benchmark of this library alone, and its results."""

import argparse
import json
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"


def parser(doc, repeats=None):
    """Returns a parser of `--out`, and of `--repeats` with its default.

    `doc` is the docstring of the script; its first line is shown.
    """
    found = argparse.ArgumentParser(description=doc.split("\n")[0])
    if repeats is not None:
        found.add_argument("--repeats", type=int, default=repeats)
    found.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return found


def write(out, name, found, table):
    """Writes figures as JSON and their table as Markdown, and prints it."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1)
    (out / f"{name}.json").write_text(text + "\n")
    (out / f"{name}.md").write_text(table)
    print(table)
