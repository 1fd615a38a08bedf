"""The models that a student learns from: frozen, and never trained."""

import contextlib
import functools
import os

import keras_hub

from keras_posttrain import optimizers
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import guards, presets
from keras_posttrain.rollout import Rollout
from keras_posttrain.training.frozen import Reference
from keras_posttrain.training.run_state import weights_digest


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

    @functools.cached_property
    def digest(self):
        """A checksum of a model's weights, `None` for the student's."""
        return weights_digest(self.values) if self.kind == "model" else None

    def check(self, length, packing):
        """Refuses what the teacher cannot read.

        Args:
            length: int, the most tokens of a row.
            packing: bool, whether sequences share a row.
        """
        longest = guards.max_length(self.policy.causal_lm)
        if longest is not None and length > longest:
            raise ValueError(
                f"`teacher_length` must be at most {longest}, the positions "
                "the teacher was made for. "
                f"Received: teacher_length={length}"
            )
        if packing and not self.policy.packable:
            raise ValueError(
                f"{type(self.policy.backbone).__name__}, the teacher, has no "
                "attention that keeps packed sequences apart. Use "
                "packing=False, or a teacher of a Gemma 1-3, Llama, Mistral "
                "or Qwen 2-3 preset."
            )

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


class GivenTeachers:
    """The teachers that a user has named; presets are loaded when needed.

    Args:
        teacher: what the user passed.
        causal_lm: the student.
        tokenizer: the `teacher_tokenizer` that was passed, or `None`.

    Attributes:
        names: list of str.
        engine: the engine that serves the teacher, or `None`.
    """

    def __init__(self, teacher, causal_lm, tokenizer=None):
        self._given = check_given(teacher, causal_lm)
        self._student, self._tokenizer = causal_lm, tokenizer
        self._loaded = {}
        self.names = list(self._given)
        engines = [x for x in self._given.values() if isinstance(x, Rollout)]
        self.engine = engines[0] if engines else None

    def __len__(self):
        return len(self._given)

    def model(self, name):
        """A `CausalLM`, or `None` for the student when training began."""
        given = self._given[name]
        if isinstance(given, Rollout):
            return given.model.causal_lm
        if not isinstance(given, (str, os.PathLike)):
            return given
        if name not in self._loaded:
            dtype = self._student.backbone.dtype_policy
            # Beside a student of shapes a teacher has no values either.
            bare = optimizers.holds_shapes(self._student.variables)
            with shapes_only() if bare else contextlib.nullcontext():
                self._loaded[name] = presets.load_causal_lm(
                    given, dtype=dtype, load_weights=not bare
                )
        return self._loaded[name]

    def models(self):
        """Those of all of them, a list."""
        return [self.model(name) for name in self.names]

    def release(self):
        """Lets go of what was loaded."""
        self._loaded = {}

    @functools.cached_property
    def vocabulary_sizes(self):
        """List of ints."""
        return [
            (model or self._student).backbone.vocabulary_size
            for model in self.models()
        ]

    def tokenizer(self, name):
        """The tokenizer of a teacher, where it is known, else `None`."""
        given = self._given[name]
        if self._tokenizer is None and isinstance(given, (str, os.PathLike)):
            return presets.load_tokenizer(given)
        return self._tokenizer


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
