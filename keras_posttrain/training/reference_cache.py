"""A reference's log-probabilities, computed once and kept on disk."""

import dataclasses

import jax
import keras
import numpy as np

from keras_posttrain.data.batches.preference import completion_key
from keras_posttrain.data.batches.row_cache import RowCache
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.distribution import processes
from keras_posttrain.models import guards
from keras_posttrain.training.run_state import weights_digest

# So many completions are written at a time: what a killed run loses.
SHARD = 512


class ReferenceCache:
    """What a task keeps of its reference in a directory.

    Args:
        directory: str or path.
        reference: `Reference`; it is not held on to.

    Attributes:
        rows: `RowCache` with `logps` for each completion, float32 of shape
            `(tokens,)`.
        kind: str, that of the reference.
        computed: int, completions that were not there before.
    """

    def __init__(self, directory, reference):
        self.rows = RowCache(directory, _header(reference))
        self.kind, self.computed = reference.kind, 0

    @property
    def label(self):
        """What tells apart the runs with another reference."""
        return f"cached {self.rows.header['weights (checksum)']}"

    def lacks(self, examples):
        """The completions of `Preference`s that are not there, by key."""
        found = {
            completion_key(example, i): (example, i)
            for example in examples
            for i in range(len(example.completions))
        }
        return {key: found[key] for key in self.rows.missing(found)}

    def fill(self, task, reference, lacking, batch_size, verbose):
        """Computes and writes completions that are not there.

        Args:
            task: `Task`.
            reference: `Reference`.
            lacking: dict as `lacks` gives it.
            batch_size: int, completions at once.
            verbose: bool, whether to show a progress bar.
        """
        processes.check_equal({"rows that the cache lacks": sorted(lacking)})
        if verbose:
            print(
                f"reference: computes {len(lacking):,} completions, which "
                f"are kept in {str(self.rows.directory)!r}",
                flush=True,
            )
        program = jax.jit(lambda state, rows: logps_of(reference, state, rows))
        state = {
            "reference": reference.values,
            "trainable": [v.value for v in task.trainable_variables],
            "frozen": [v.value for v in task.non_trainable_variables],
        }
        bar = keras.utils.Progbar(len(lacking), verbose=int(bool(verbose)))
        # By length, so that no batch is longer than need be.
        keys = sorted(lacking, key=lambda key: _length(*lacking[key]))
        for first in range(0, len(keys), SHARD):
            shard = [lacking[key] for key in keys[first : first + SHARD]]
            batches = task.plain_batches(
                [_example(*found) for found in shard],
                batch_size,
                shuffle=False,
            )
            logps = []
            for batch in batches.get_jax_iterator():
                found = processes.fetch(program(state, batch))
                # Without the rows of padding.
                logps += list(found[batch["sequence_mask"][:, 0] > 0])
                bar.update(min(first + len(logps), len(keys)))
            rows = {}
            for (example, i), row in zip(shard, logps):
                start, stop = len(example.prompt), _length(example, i)
                key = completion_key(example, i)
                rows[key] = {"logps": row[start:stop]}
            self.rows.write(rows)
            self.computed += len(rows)


def logps_of(reference, state, batch):
    """The log-probabilities that a reference gives to completions.

    Args:
        reference: `Reference`.
        state: dict of lists of arrays: its own as `reference`, and
            `trainable` and `frozen`.
        batch: dict of arrays.

    Returns:
        A float32 array of shape `(rows, length)`, 0 where there is no loss.
    """
    weights = state["reference"], state["trainable"], state["frozen"]
    with reference.using(*weights):
        return reference.policy.token_outputs(
            batch, batch["completion_mask"] != 0, differentiable=False
        )["per_token_logps"]


def _header(reference):
    task, causal_lm = reference.task, reference.policy.causal_lm
    variables, lora = causal_lm.variables, None
    if reference.kind == "copy" and task.adapter is not None:
        variables = [*variables, *task.adapter.variables]
        lora = dataclasses.asdict(task.adapter.lora)
    return {
        "kind": "log-probabilities of a reference",
        "model": type(causal_lm).__name__,
        "config": guards.architecture(causal_lm),
        "dtype": causal_lm.backbone.dtype_policy.name,
        "lora": lora,
        "weights (checksum)": weights_digest([v.value for v in variables]),
    }


def _length(example, i):
    return len(example.prompt) + len(example.completions[i])


def _example(example, i):
    """A completion with loss at all of its tokens."""
    tokens = np.concatenate([example.prompt, example.completions[i]])
    mask = np.zeros(len(tokens), np.float32)
    mask[len(example.prompt) :] = 1.0
    return Example(tokens, mask, example.row)
