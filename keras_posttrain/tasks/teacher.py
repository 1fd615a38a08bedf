"""The models that a student learns from: frozen, and never trained."""

import os

import jax
import jax.numpy as jnp
import keras_hub

from keras_posttrain.models import presets
from keras_posttrain.rollout import Rollout
from keras_posttrain.tasks import step as steps
from keras_posttrain.tasks.reference import Reference


class Teacher(Reference):
    """A teacher that runs in the student's own step.

    Args:
        task: `DistillTask`.
        model: a preset, a KerasHub `CausalLM`, or `None` for the student when
            training began.
        other_vocabulary: bool, whether its tokens may be others than the
            student's.
    """

    role = "teacher"

    def __init__(self, task, model=None, other_vocabulary=False):
        self.other_vocabulary = other_vocabulary
        self.given = model
        super().__init__(task, model)

    def _check_vocabulary(self, theirs):
        ours = self.task.causal_lm.backbone.vocabulary_size
        if ours != theirs and not self.other_vocabulary:
            raise ValueError(
                "The teacher must have the vocabulary of the student: their "
                "distributions are compared token by token. Received: a "
                f"teacher with vocabulary_size={theirs}, a student with "
                f"vocabulary_size={ours}. Use a teacher of the same family, "
                "or `kpt.losses.ULDLoss()`, which compares what has no "
                "tokens in common."
            )

    def digest(self):
        """A checksum of its weights, an int."""
        task = self.task
        values = self.values
        if self.kind == "off":
            # The adapter counts for nothing.
            values = [v.value for v in task.causal_lm.variables]
        return int(jax.jit(_digest)(values))


def _digest(values):
    total = jnp.uint32(0)
    for i, x in enumerate(values):
        bits = steps.bits(x)
        place = jnp.arange(bits.size, dtype="uint32") * 2 + i
        total += jnp.sum(bits.reshape(-1) * (place + 1))
    return total


def check_given(teacher, causal_lm):
    """Refuses what is no teacher; a dict of those that were given by name.

    Args:
        teacher: what the user passed.
        causal_lm: the student.

    Returns:
        Dict from name to preset, `CausalLM`, engine or `None`.
    """
    many = teacher
    if isinstance(teacher, (list, tuple)):
        many = {str(i): x for i, x in enumerate(teacher)}
    elif not isinstance(teacher, dict):
        many = {"teacher": teacher}
    known = (str, os.PathLike, keras_hub.models.CausalLM, Rollout)
    for name, given in many.items():
        if given is causal_lm:
            raise ValueError(
                "The teacher must be another model than the student: from "
                "itself there is nothing to learn. For the student as it was "
                "when training began (with a longer prompt, say), leave "
                "`teacher` out."
            )
        if given is not None and not isinstance(given, known):
            raise ValueError(
                "`teacher` must be a preset, a KerasHub `CausalLM`, an "
                "engine such as `kpt.rollout.NativeRollout()`, None for the "
                "student when training began, or a list or dict of these. "
                f"Received: {name!r}: {given!r}"
            )
    engines = [x for x in many.values() if isinstance(x, Rollout)]
    if not many or (engines and len(many) > 1):
        raise ValueError(
            "`teacher` must name at least one teacher, and only one where it "
            f"is served by an engine. Received: teacher={teacher!r}"
        )
    if engines and engines[0].model is None:
        raise ValueError(
            "An engine that teaches must have a model: call "
            "`engine.set_model(task)` with a task of the teacher's first."
        )
    return many


def teacher_tokenizer(given, tokenizer):
    """The tokenizer of a teacher with other tokens.

    Args:
        given: preset or `CausalLM`.
        tokenizer: what the user passed as `teacher_tokenizer`, or `None`.
    """
    if tokenizer is None and isinstance(given, (str, os.PathLike)):
        tokenizer = presets.load_tokenizer(given)
    if tokenizer is None:
        raise ValueError(
            "A teacher with other tokens needs its tokenizer, which a "
            "`CausalLM` does not bring. Pass `teacher_tokenizer=`, or the "
            "teacher as a preset."
        )
    return tokenizer
