"""Tokenizes rows, in a worker process.

A worker loads this file alone, and of the package the modules that read rows:
JAX and Keras would take seconds and most of a gigabyte in each process.
"""

import functools
import importlib
import pathlib
import pickle
import sys
import types


def tokenizer_of_rows(folder, data):
    """Returns the function of a worker.

    Args:
        folder: string, that of the package.
        data: bytes, a pickled `Preparation`.
    """
    package = pathlib.Path(folder).name
    # The package's own `__init__` file imports Keras.
    for name in (package, f"{package}.data"):
        module = sys.modules[name] = types.ModuleType(name)
        parts = name.split(".")[1:]
        module.__path__ = [str(pathlib.Path(folder, *parts))]
    module_of = functools.partial(importlib.import_module, package=package)
    module_of(".data.chat.template").render_in_this_process()
    return RowTokenizer(
        pickle.loads(data),
        module_of(".data.rows.preparation").prepare_part,
        module_of(".data.rows.records").Part.of,
    )


class RowTokenizer:
    """Prepares parts of a dataset by a `Preparation`.

    What rows contain is data of strangers, and so is the template that is
    rendered here. The answers are JSON and bytes.

    Args:
        preparation: `Preparation`.
        prepare_part, part_of: functions of the package.
    """

    def __init__(self, preparation, prepare_part, part_of):
        self.preparation = preparation
        self.prepare_part, self.part_of = prepare_part, part_of

    def __call__(self, start, rows, filtered):
        """Prepares the rows of a dataset from row `start` on.

        Args:
            start: int.
            rows: list of rows.
            filtered: bool, whether `None` is a row that was filtered out.

        Returns:
            Dict of the fields of a `Part`, and of `report` and `firsts`; an
            empty dict where a row cannot be prepared.
        """
        report = self.preparation.report
        report.clear()
        try:
            examples = self.prepare_part(
                self.preparation, start, rows, filtered
            )
        except Exception:
            # The other process prepares these rows again, and says why.
            return {}
        part = self.part_of(examples)
        return {
            "records": part.records,
            "hashed": part.hashed,
            "sizes": part.sizes,
            "summary": part.summary,
            "report": report.counts(),
            "firsts": self.preparation.first_values(),
        }
