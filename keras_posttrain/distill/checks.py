"""Checks of what users pass to a distillation."""

import numbers

import numpy as np

from keras_posttrain import _remote
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.distill.step import parts
from keras_posttrain.losses import (
    DistillationLoss,
    PolicyLoss,
    TokenLoss,
)
from keras_posttrain.losses.features import FeatureLoss
from keras_posttrain.rl import checks as rl_checks
from keras_posttrain.training import checks

# Arguments of `compile` that say how to sample, and their defaults.
SAMPLING = {
    "rollout": "auto",
    "num_generations": 1,
    "max_completion_length": 256,
    "temperature": 1.0,
    "stop_token_ids": "auto",
    "num_minibatches": 1,
    "num_iterations": 1,
    "old_log_probs": "trainer",
    "mask_truncated_completions": False,
}


def share(name, value):
    """Returns a share from 0 to 1 for a bool or a number."""
    is_number = isinstance(value, numbers.Real)
    if not is_number or not 0 <= value <= 1:
        raise ValueError(
            f"`{name}` must be True, False or a share from 0 to 1. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def unused(settings):
    """Refuses settings of samples where nothing is sampled."""
    for name, default in SAMPLING.items():
        value = settings[name]
        if value is not default and value != default:
            raise ValueError(
                f"`{name}` is about the student's own samples, of which "
                "there are none. Use on_policy=True, or leave it out. "
                f"Received: {name}={value!r}"
            )


def loss(loss, on_policy):
    if isinstance(loss, PolicyLoss):
        if on_policy == 1.0:
            return
        raise ValueError(
            "A policy loss goes by the student's own samples. Use "
            f"on_policy=True. Received: loss={loss!r}, on_policy={on_policy}"
        )
    known = (DistillationLoss, FeatureLoss, TokenLoss)
    found = [part for _, _, part in parts(loss)]
    if not all(isinstance(x, known) for x in found):
        also = ", or with on_policy=True a policy loss"
        raise ValueError(
            "`loss` must be 'auto', a loss of a teacher such as "
            "`kpt.losses.ForwardKLLoss()` or `kpt.losses.HiddenStateLoss()`, "
            f"a SumLoss of such{also}. Received: loss={loss!r}"
        )
    if all(isinstance(x, TokenLoss) for x in found):
        raise ValueError(
            "This loss asks nothing of the teacher. Use `kpt.SFTTask`, or "
            f"add a loss that does by `SumLoss`. Received: loss={loss!r}"
        )


def feature_losses(loss):
    """Returns the feature losses that a loss is made of, a tuple."""
    return tuple(x for *_, x in parts(loss) if isinstance(x, FeatureLoss))


def same_losses(losses, known):
    if losses != known:
        raise ValueError(
            "A task keeps the feature losses of its first `compile`, "
            f"whose maps it has trained: {list(known)!r}. Make a new "
            f"task for others. Received: {list(losses)!r}"
        )


def teacher_settings(given, teacher_weights, column, top_k, cache):
    if top_k is not None:
        checks.positive_int("top_k", top_k)
    if column is not None and not isinstance(column, str):
        raise ValueError(
            "`teacher_column` must be the name of a column. "
            f"Received: teacher_column={column!r}"
        )
    for name, value in (
        ("teacher_column", column),
        ("teacher_weights", teacher_weights),
    ):
        if value is not None and len(given) == 1:
            raise ValueError(
                f"`{name}` says which of several teachers counts. Pass "
                "`teacher=[...]` or `teacher={...}`, or leave it out. "
                f"Received: {name}={value!r}, one teacher"
            )
    if column is not None and teacher_weights is not None:
        raise ValueError(
            "A row has the teacher that its column names, or all by their "
            "weights. Leave one of `teacher_column` and `teacher_weights` "
            "out."
        )
    _remote.need_local("teacher_cache", cache)
    kept = cache is not None or given.engine is not None
    if kept and top_k is None:
        raise ValueError(
            "Of a teacher that is written down or served, the most probable "
            "tokens are kept. Say how many: `top_k=64`."
        )
    if top_k is not None and not kept:
        raise ValueError(
            "A teacher that runs in the step gives its whole distribution. "
            "Leave `top_k` out, or pass `teacher_cache=` for one that is "
            f"written down. Received: top_k={top_k}"
        )
    if cache is not None and len(given) > 1:
        raise ValueError(
            "Of several teachers nothing is written down. Leave "
            "`teacher_cache` out, or train with one. Received: "
            f"{len(given)} teachers"
        )


def weights(weights, column, names):
    """Returns the weights of teachers as a tuple, or `None` for one."""
    if len(names) == 1 or column is not None:
        return None
    if weights is None:
        return (1.0 / len(names),) * len(names)
    given = weights
    if isinstance(weights, dict):
        if set(names) != set(weights):
            raise ValueError(
                "`teacher_weights` must name the teachers, "
                f"{sorted(names)}. Received: {sorted(weights)}"
            )
        given = [weights[name] for name in names]
    array = np.asarray(given, "float64")
    if array.shape != (len(names),) or not np.isfinite(array).all():
        raise ValueError(
            "`teacher_weights` must be one finite number for each of the "
            f"{len(names)} teachers. Received: teacher_weights={weights!r}"
        )
    return tuple(array.tolist())


def other_tokens(ours, own_tokenizer, theirs, tokenizer):
    """Explains why a teacher's tokens are not the student's, or `None`.

    `ours` and `theirs` are the vocabulary sizes of student and teacher;
    `tokenizer`, the teacher's, is `None` where it is not known.
    """
    if ours != theirs:
        return (
            f"it has vocabulary_size={theirs}, the student "
            f"vocabulary_size={ours}"
        )
    if tokenizer is not None and own_tokenizer is not None:
        a, b = (x.backend.get_vocab() for x in (own_tokenizer, tokenizer))
        if a != b:
            differ = sum(b.get(text) != i for text, i in a.items())
            return f"{differ} of the student's {len(a)} tokens have other ids"
    return None


def universal(loss, name, why):
    """Refuses losses that compare token by token."""
    for _, _, part in parts(loss):
        universal = isinstance(part, TokenLoss) or (
            isinstance(part, DistillationLoss) and not part.same_vocabulary
        )
        if not universal:
            raise ValueError(
                f"{type(part).__name__} compares token by token, and teacher "
                f"{name!r} has other tokens: {why}. Use a teacher of the "
                "same family, or `kpt.losses.ULDLoss()` with the teacher's "
                "tokenizer."
            )


def other_tokenizer(given, loss, tokenizer, vocabulary):
    """Returns the tokenizer of a teacher with other tokens, or `None`.

    Raises a `ValueError` for a loss that compares token by token, and a
    teacher whose tokenizer is not known. `vocabulary` is the student's size.
    """
    for name, size in zip(given.names, given.vocabulary_sizes):
        found = given.tokenizer(name)
        why = other_tokens(vocabulary, tokenizer, size, found)
        if not why:
            continue
        universal(loss, name, why)
        if found is None:
            raise ValueError(
                f"Teacher {name!r} has other tokens, and a `CausalLM` brings "
                "no tokenizer. Pass `teacher_tokenizer=`, or the teacher as "
                "a preset."
            )
        return found
    return None


def cacheable(examples, directory):
    if directory is not None and is_stream(examples):
        raise ValueError(
            "A teacher's answers to all rows are cached before the first "
            "step. Received: a stream with "
            f"teacher_cache={str(directory)!r}. Use a Grain "
            "`MapDataset`, a list of dicts or a file."
        )


def refuse_new_rows(count, directory):
    raise ValueError(
        "The teacher is the student when training began, which is no longer "
        f"there to be asked about new rows. Received: {count} rows that are "
        f"not in {str(directory)!r}. Pass them to `fit` as "
        "`validation_data`, or evaluate them before training."
    )


def combination(loss, given, top_k, cache, *, on_policy, other, vocabulary):
    """Raises a `ValueError` for settings that exclude each other.

    `other` says whether the teacher has other tokens.
    """
    found = [part for _, _, part in parts(loss)]
    engine = given.engine
    kept = cache is not None or engine is not None
    features = feature_losses(loss)
    divergences = [x for x in found if isinstance(x, DistillationLoss)]
    for wrong, text in (
        (
            cache is not None and on_policy,
            "The student's own samples are new at each step: there is "
            "nothing to write down. Leave `teacher_cache` out.",
        ),
        (
            engine is not None and not on_policy and cache is None,
            "On given rows a served teacher is asked once. Pass "
            "`teacher_cache=` for where its answers are kept.",
        ),
        (
            features and kept,
            "A feature loss reads the inside of the teacher, of which "
            "nothing is written down or served. Leave `teacher_cache` out "
            "and pass the teacher as a model.",
        ),
        (
            features and len(given) > 1,
            "A feature loss compares with one teacher.",
        ),
        (
            other and (kept or on_policy or len(given) > 1),
            "A teacher with other tokens can be one, that runs in the step, "
            "on given rows.",
        ),
        (
            kept and any(not x.same_vocabulary for x in divergences),
            "ULDLoss sorts the whole distribution, of which the most "
            "probable tokens are not enough. Leave `teacher_cache` out.",
        ),
        (
            kept and len({x.temperature for x in divergences}) > 1,
            "The teacher's log-probabilities are kept at one temperature.",
        ),
    ):
        if wrong:
            raise ValueError(f"{text} Received: loss={loss!r}")
    if top_k is not None and top_k > vocabulary:
        raise ValueError(
            f"`top_k` must be at most the vocabulary's {vocabulary} tokens. "
            f"Received: top_k={top_k}"
        )


def may_evaluate(loss):
    if isinstance(loss, PolicyLoss):
        raise ValueError(
            "A policy loss has no value on given rows. To see how near the "
            "student comes to the teacher, compile with "
            "`kpt.losses.ReverseKLLoss()` and evaluate."
        )


def plannable(given, *, on_policy, cache, other):
    """Raises a `ValueError` for a step that reads more than its rows."""
    why = None
    if len(given) > 1:
        why = "one teacher, the largest: each adds a pass of its own"
    elif given.engine is not None or cache is not None:
        why = "an SFTTask of the student: the teacher is not in the step"
    elif other:
        why = "a teacher that has the student's tokenizer"
    elif on_policy:
        why = "on_policy=False: rows that are sampled take the same step"
    if why is not None:
        raise ValueError(
            "Of a distillation a step is planned on given rows, with one "
            f"teacher that reads the same tokens. Plan {why}. Received: "
            f"teachers {given.names}, on_policy={on_policy}, "
            f"teacher_cache={cache!r}"
        )


def episode(given, tokenizer, on_policy, teachers):
    """Returns the `Episode` of what a user passed to `compile`, or `None`."""
    found = rl_checks.episode(given, tokenizer)
    if found is None:
        return None
    if on_policy < 1.0 or len(teachers) > 1 or found.opponents:
        raise ValueError(
            "An episode needs on_policy=True, one teacher and no opponents. "
            f"Received: on_policy={on_policy}, teachers={teachers.names}, "
            f"opponents={sorted(found.opponents)}"
        )
    return found


def samples(
    on_policy, engine, own, *, sequence_length, max_length, **settings
):
    """Makes `(Rollout, Sampling)` of how the student samples, checked.

    Both are `None` without samples. `engine` and `own` are as of
    `rl_checks.engine`, `settings` of `rl_checks.sampling`.
    """
    if not on_policy:
        unused({"rollout": engine, **settings})
        return None, None
    sampling = rl_checks.sampling(**settings)
    rl_checks.room(sequence_length, max_length, sampling.max_completion_length)
    many = sampling.num_generations
    if on_policy < 1.0 and many > 1:
        raise ValueError(
            "Rows that are given have one completion, so with a "
            "share of them `num_generations` must be 1. Received: "
            f"on_policy={on_policy}, num_generations={many}"
        )
    return rl_checks.engine(engine, own), sampling
