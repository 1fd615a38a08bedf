"""A teacher's most probable tokens: asked for once, and kept on disk."""

import dataclasses

import jax
import keras
import numpy as np

from keras_posttrain.data.batches.row_cache import RowCache, row_key
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.distribution import processes
from keras_posttrain.models import guards
from keras_posttrain.training.run_state import weights_digest

# So many rows are written at a time: what a killed run loses.
SHARD = 512


def first_learned(example):
    """Int, the first token with loss."""
    return int(np.argmax(example.completion_mask != 0))


def heard(example):
    """What the teacher reads of an example: `(tokens, start)`.

    Args:
        example: `Example`.

    Returns:
        int32 array, and the place in it from which the teacher is asked.
    """
    if not _reads_own(example):
        return example.token_ids, first_learned(example)
    source = example.teacher_source
    start = source[source >= 0].min(initial=len(example.teacher_ids) - 1)
    return example.teacher_ids, int(start) + 1


def placed(example, arrays):
    """A teacher's answers in line with the student's tokens.

    Args:
        example: `Example`.
        arrays: dict of arrays of shape `(tokens, k)`, from the first token
            that the teacher was asked for.

    Returns:
        Dict of arrays of shape `(tokens of the example, k)`, 0 where the
        teacher was not asked.
    """
    start = heard(example)[1]
    tokens = np.arange(len(example.token_ids))
    place = tokens - start
    if _reads_own(example):
        place = np.where(
            example.teacher_source >= 0,
            example.teacher_source + 1 - start,
            -1,
        )
    out = {}
    for name, values in arrays.items():
        whole = np.zeros((len(tokens), *values.shape[1:]), values.dtype)
        asked = (place >= 0) & (place < len(values))
        whole[asked] = values[place[asked]]
        out[name] = whole
    return out


def _reads_own(example):
    return getattr(example, "teacher_ids", None) is not None


class TeacherCache:
    """What is kept of a teacher in a directory.

    Args:
        task: `DistillTask`.
        directory: str or path.
        temperature: float, of the log-probabilities.
        top_k: int.

    Attributes:
        rows: `RowCache`; of each row `ids` (int32) and `logps` (float32) of
            shape `(tokens, k)`, from its first token with loss.
        kind: str, that of the `Teacher`, or `"served"`.
        computed: int, rows that were not there before.
    """

    def __init__(self, task, directory, temperature, top_k):
        self.task, self.temperature, self.top_k = task, temperature, top_k
        self.rows = RowCache(directory, self._header())
        self.kind = task.teachers[0].kind if task.teachers else "served"
        self.computed = 0

    def _header(self):
        task = self.task
        engine = task.given.engine
        if engine is not None:
            teacher, causal_lm = None, engine.model.causal_lm
            variables, lora = engine.model.variables, engine.model.adapter
        else:
            (teacher,) = task.teachers
            causal_lm = teacher.policy.causal_lm
            variables, lora = causal_lm.variables, None
            if teacher.kind == "copy":
                variables, lora = task.variables, task.adapter
        return {
            "kind": "a teacher's most probable tokens",
            "model": type(causal_lm).__name__,
            "config": guards.architecture(causal_lm),
            "dtype": causal_lm.backbone.dtype_policy.name,
            "lora": dataclasses.asdict(lora.lora) if lora else None,
            "weights (checksum)": weights_digest([v.value for v in variables]),
            "temperature": self.temperature,
            "top_k": self.top_k,
        }

    def lookup(self, example):
        """The `ids` and `logps` of an example, `(tokens, k)` each."""
        return placed(example, self.rows.read(row_key(*heard(example))))

    def lacks(self, examples):
        """The examples that are not there yet, by key."""
        found = {row_key(*heard(x)): x for x in examples}
        return {key: found[key] for key in self.rows.missing(found)}

    def fill(self, lacking, batch_size, verbose):
        """Asks the teacher about what is not there yet.

        Args:
            lacking: dict as `lacks` gives it.
            batch_size: int, rows at once.
            verbose: bool, whether to show a progress bar.
        """
        processes.check_equal({"rows that the cache lacks": sorted(lacking)})
        if verbose:
            print(
                f"teacher: reads {len(lacking):,} rows, which are kept in "
                f"{str(self.rows.directory)!r}",
                flush=True,
            )
        ask = (
            self._served if self.task.given.engine is not None else self._own()
        )
        bar = keras.utils.Progbar(len(lacking), verbose=int(bool(verbose)))
        # By length, so that no batch is longer than need be.
        keys = sorted(lacking, key=lambda key: len(heard(lacking[key])[0]))
        for first in range(0, len(keys), SHARD):
            shard = keys[first : first + SHARD]
            sequences = [heard(lacking[key]) for key in shard]
            answers = ask(sequences, batch_size)
            self.rows.write(dict(zip(shard, answers, strict=True)))
            self.computed += len(shard)
            bar.update(first + len(shard))

    def _served(self, sequences, batch_size):
        del batch_size  # the engine knows what it has room for
        return served_top_tokens(
            self.task.given.engine, sequences, self.top_k, self.temperature
        )

    def _own(self):
        """A function like `_served`, of the teacher in this process."""
        task, (teacher,) = self.task, self.task.teachers

        @jax.jit
        def program(values, trainable, frozen, batch):
            with teacher.using(values, trainable, frozen):
                mask = batch["completion_mask"] != 0
                return teacher.policy.top_tokens(
                    batch, mask, self.top_k, self.temperature
                )

        state = (
            teacher.values,
            [v.value for v in task.trainable_variables],
            [v.value for v in task.non_trainable_variables],
        )

        def ask(sequences, batch_size):
            batches = task.plain_batches(
                [_asked(*sequence) for sequence in sequences],
                batch_size,
                sequence_length=max(2, *(len(x) for x, _ in sequences)),
                shuffle=False,
            )
            out = []
            for batch in batches.get_jax_iterator():
                found = processes.fetch(program(*state, batch))
                # Without the rows of padding.
                rows = np.flatnonzero(batch["sequence_mask"][:, 0])
                out += zip(found["top_ids"][rows], found["top_logps"][rows])
            return [
                {
                    "ids": top[start : len(ids)],
                    "logps": logps[start : len(ids)],
                }
                for (ids, start), (top, logps) in zip(sequences, out)
            ]

        return ask


def _asked(ids, start):
    mask = np.zeros(len(ids), np.float32)
    mask[start:] = 1.0
    return Example(np.asarray(ids, np.int32), mask, 0)


def served_top_tokens(engine, sequences, top_k, temperature):
    """The most probable tokens by an engine.

    Args:
        engine: `Rollout`, ready.
        sequences: list of `(tokens, start)`, as `heard` gives them.
        top_k, temperature: as in `Rollout.score`.

    Returns:
        List of dicts with `ids` (int32) and `logps` (float32) of shape
        `(tokens - start, k)`.
    """
    scores = engine.score(
        [list(ids) for ids, _ in sequences],
        top_k=top_k,
        temperature=temperature,
    )
    return [
        {
            "ids": np.asarray(s.top_ids[start:], np.int32),
            "logps": np.asarray(s.top_logps[start:], np.float32),
        }
        for s, (_, start) in zip(scores, sequences)
    ]
