"""The models that a student is distilled from."""

import contextlib
import functools
import os

import keras_hub

from keras_posttrain import optimizers
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import presets
from keras_posttrain.rollout import Rollout
from keras_posttrain.training.frozen import (
    frozen_model,
    frozen_policy,
    model_of,
)


class TeacherSources:
    """The teachers that a user has named; presets are loaded when needed.

    `causal_lm` is the student. `engine` serves the teacher, or is `None`.
    """

    def __init__(self, teacher, causal_lm, tokenizer=None):
        given = check_teachers(teacher, causal_lm)
        self._given = {name: model_of(x) for name, x in given.items()}
        self._student, self._tokenizer = causal_lm, tokenizer
        # Of teachers that are tasks.
        self._tokenizers = {
            name: x.tokenizer
            for name, x in given.items()
            if model_of(x) is not x
        }
        self._loaded = {}
        self.names = list(self._given)
        engines = [x for x in self._given.values() if isinstance(x, Rollout)]
        self.engine = engines[0] if engines else None

    def __len__(self):
        return len(self._given)

    def model(self, name):
        """Returns a `CausalLM`, or `None` for the initial student."""
        given = self._given[name]
        if isinstance(given, Rollout):
            return given.model.causal_lm
        if not isinstance(given, (str, os.PathLike)):
            return given
        if name not in self._loaded:
            dtype = self._student.backbone.dtype_policy
            # A student of shapes has a teacher without values.
            bare = optimizers.holds_shapes(self._student.variables)
            with shapes_only() if bare else contextlib.nullcontext():
                self._loaded[name] = presets.load_companion(
                    given, dtype, load_weights=not bare
                )
        return self._loaded[name]

    def models(self):
        """Returns the models of all teachers, a list."""
        return [self.model(name) for name in self.names]

    def release(self):
        """Frees the models that were loaded."""
        self._loaded = {}

    @contextlib.contextmanager
    def ready(self):
        """Opens a scope in which the engine, if there is one, is started."""
        if self.engine is None:
            yield
            return
        self.engine.start()
        try:
            yield
        finally:
            self.engine.stop()

    @functools.cached_property
    def vocabulary_sizes(self):
        """List of ints."""
        return [
            (model or self._student).backbone.vocabulary_size
            for model in self.models()
        ]

    def tokenizer(self, name):
        """Returns the tokenizer of a teacher, or `None` if unknown."""
        given = self._given[name]
        if self._tokenizer is None and isinstance(given, (str, os.PathLike)):
            return presets.load_tokenizer(given)
        return self._tokenizer or self._tokenizers.get(name)

    def freeze(self, policy, weights, same_tokens=True):
        """Returns a tuple of `FrozenPolicy`s, one a teacher.

        `policy` and `weights` are the student's. With `same_tokens` the
        teachers must have its vocabulary.
        """
        return tuple(
            frozen_policy(policy, weights, role="teacher")
            if model is None
            else frozen_model(
                model, policy, role="teacher", same_tokens=same_tokens
            )
            for model in self.models()
        )


def check_teachers(teacher, causal_lm):
    """Returns the teachers by name, or raises a `ValueError`."""
    many = teacher
    if isinstance(teacher, (list, tuple)):
        many = {str(i): x for i, x in enumerate(teacher)}
    elif not isinstance(teacher, dict):
        many = {"teacher": teacher}
    known = (str, os.PathLike, keras_hub.models.CausalLM, Rollout)
    for name, given in many.items():
        if model_of(given) is causal_lm:
            raise ValueError(
                "The teacher must be another model than the student: from "
                "itself there is nothing to learn. For the student as it was "
                "when training began (with a longer prompt, say), leave "
                "`teacher` out."
            )
        if given is not None and not isinstance(model_of(given), known):
            raise ValueError(
                "`teacher` must be a preset, a KerasHub `CausalLM`, a task, "
                "an engine such as `kpt.rollout.NativeRollout()`, None for "
                "the student when training began, or a list or dict of "
                "these. "
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
            "An engine that serves a teacher must have a model: call "
            "`engine.set_model(task)` with a task of the teacher's first."
        )
    return many
