"""A teacher's most probable tokens: computed once and kept on disk."""

import jax
import numpy as np

from keras_posttrain.data.batches.row_cache import row_key
from keras_posttrain.training.frozen import model_identity
from keras_posttrain.training.frozen_cache import FrozenCache, Span, run_rows


def first_with_loss(example):
    """Returns a int, the first token with loss."""
    return int(np.argmax(example.completion_mask != 0))


def teacher_span(example):
    """Returns the teacher's view of an example as a `Span`."""
    if not _reads_own(example):
        return Span(example.token_ids, first_with_loss(example))
    source = example.teacher_source
    start = source[source >= 0].min(initial=len(example.teacher_ids) - 1)
    return Span(example.teacher_ids, int(start) + 1)


def spans_by_key(examples):
    """Returns the `teacher_span` of each example, by its key in a cache."""
    spans = map(teacher_span, examples)
    return {row_key(span.token_ids, span.start): span for span in spans}


def aligned(example, arrays):
    """Aligns a teacher's answers with the student's tokens.

    `arrays` are `(tokens, k)`, from the first token that the teacher was
    asked for. They are returned with the tokens of the example, 0 where the
    teacher was not asked.
    """
    start = teacher_span(example).start
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


def teacher_cache(directory, teacher, engine, temperature, top_k):
    """Returns the `FrozenCache` of a teacher's most probable tokens.

    It holds of each row `ids` (int32) and `logps` (float32) of shape
    `(tokens, k)`, from its first token with loss. `teacher` is `None` where
    an engine serves it.
    """
    if engine is not None:
        model = engine.model
        identity = model_identity(model.causal_lm, model.adapter)
        kind = "served"
    else:
        identity, kind = teacher.identity(), teacher.kind
    header = {
        "kind": "a teacher's most probable tokens",
        **identity,
        "temperature": temperature,
        "top_k": top_k,
    }
    return FrozenCache(directory, header, kind)


def cached_tokens(cache):
    """Makes a lookup of an example's `ids` and `logps`, `(tokens, k)`."""

    def lookup(example):
        span = teacher_span(example)
        found = cache.rows.read(row_key(span.token_ids, span.start))
        return aligned(example, found)

    return lookup


def served_top_tokens(engine, spans, top_k, temperature):
    """Asks a ready engine for the most probable tokens of some spans.

    Returns a list of dicts with `ids` (int32) and `logps` (float32) of shape
    `(tokens - start, k)`.
    """
    scores = engine.score(
        [list(span.token_ids) for span in spans],
        top_k=top_k,
        temperature=temperature,
    )
    return [
        {
            "ids": np.asarray(s.top_ids[span.start :], np.int32),
            "logps": np.asarray(s.top_logps[span.start :], np.float32),
        }
        for s, span in zip(scores, spans)
    ]


def top_tokens(teacher, weights, batches, top_k, temperature):
    """Returns a `compute` of `FrozenCache.fill`, of a teacher in this process.

    `batches` is a function of a list of `Example`s and the longest of them to
    a `BatchAdapter`; `weights` are the student's.
    """

    @jax.jit
    def program(values, trainable, frozen, batch):
        with teacher.using(values, trainable, frozen):
            mask = batch["completion_mask"] != 0
            return teacher.policy.top_tokens(batch, mask, top_k, temperature)

    state = teacher.values, *weights.values()

    def compute(spans):
        rows = run_rows(
            lambda batch: program(*state, batch),
            batches(
                [span.example() for span in spans],
                max(2, *(span.stop for span in spans)),
            ),
        )
        for span, found in zip(spans, rows, strict=True):
            part = slice(span.start, span.stop)
            yield {
                "ids": found["top_ids"][part],
                "logps": found["top_logps"][part],
            }

    return compute
