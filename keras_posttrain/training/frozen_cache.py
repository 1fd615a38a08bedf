"""Outputs of a frozen model by row, computed once and kept on disk."""

import dataclasses

import jax
import keras
import numpy as np

from keras_posttrain import _console
from keras_posttrain.data.batches.preference import completion_key
from keras_posttrain.data.batches.row_cache import RowCache
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.distribution import processes
from keras_posttrain.models import quantized, sharding

# Rows that are written at a time, the most that a killed run loses.
SHARD = 512


class FrozenCache:
    """Arrays of a frozen model by row, in a directory.

    Args:
        header: dict, what the arrays depend on: `FrozenPolicy.identity` and
            settings. A directory with another header is refused.
        kind: str, that of the `FrozenPolicy`, or `"served"`.

    Attributes:
        computed: int, rows that were not there before.
    """

    def __init__(self, directory, header, kind):
        self.rows = RowCache(directory, header)
        self.kind, self.computed = kind, 0

    @property
    def label(self):
        """Str, the same for all runs with these frozen weights."""
        return f"cached {self.rows.header['weights (checksum)']}"

    def missing(self, items):
        """Selects the items of a dict by key that are not cached yet."""
        return {key: items[key] for key in self.rows.missing(items)}

    def fill(self, missing, length, compute, message, verbose):
        """Computes and writes what is missing, the shortest first.

        Args:
            missing: dict of items by key, as `missing` returns it.
            length: function of an item, its tokens.
            compute: function of a list of items that yields a dict of arrays
                for each.
            message: str, printed before the progress bar.
        """
        processes.check_equal({"rows that the cache lacks": sorted(missing)})
        if verbose:
            _console.say(f"{message} {str(self.rows.directory)!r}")
        bar = keras.utils.Progbar(len(missing), verbose=int(bool(verbose)))
        # By length, so that no batch is longer than need be.
        keys = sorted(missing, key=lambda key: length(missing[key]))
        for first in range(0, len(keys), SHARD):
            shard, found = keys[first : first + SHARD], []
            for arrays in compute([missing[key] for key in shard]):
                found.append(arrays)
                bar.update(first + len(found))
            self.rows.write(dict(zip(shard, found, strict=True)))
            self.computed += len(found)


def run_rows(program, batches):
    """Runs a program over batches of one sequence per row.

    `program` computes from a batch a pytree of arrays, `(rows, ...)`. Yields
    for each example its part of them; padding rows are left out.
    """
    for batch in batches.get_jax_iterator():
        found = processes.fetch(program(processes.put_rows(batch)))
        for row in np.flatnonzero(batch["sequence_mask"][:, 0]):
            yield {name: values[row] for name, values in found.items()}


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of a sequence that a frozen model scores, from `start` on."""

    token_ids: np.ndarray
    start: int
    images: object = None

    @property
    def stop(self):
        """Int, tokens of the sequence."""
        return len(self.token_ids)

    def example(self):
        """Returns the sequence as an `Example`, with loss in this part."""
        mask = np.zeros(self.stop, np.float32)
        mask[self.start :] = 1.0
        ids = np.asarray(self.token_ids, np.int32)
        return Example(ids, mask, 0, self.images)


def completions_by_key(examples):
    """Returns the completions of `Preference`s as `Span`s, by key."""
    return {
        completion_key(example, i): Span(
            np.concatenate([example.prompt, completion]),
            len(example.prompt),
            example.images,
        )
        for example in examples
        for i, completion in enumerate(example.completions)
    }


def completion_logps(reference, weights, batches):
    """Returns a `compute` of `FrozenCache.fill`: log-probabilities of `Span`s.

    `weights` are of the trained policy; `batches` is a function of a list of
    `Example`s to a `BatchAdapter`.
    """
    options = quantized.compiler_options(reference.causal_lm)
    program = jax.jit(
        reference.logps,
        out_shardings=sharding.of_results(),
        compiler_options=options,
    )
    state = reference.values, *weights.values()

    def compute(spans):
        rows = run_rows(
            lambda batch: {"logps": program(*state, batch)},
            batches([span.example() for span in spans]),
        )
        for span, found in zip(spans, rows, strict=True):
            yield {"logps": found["logps"][span.start : span.stop]}

    return compute
