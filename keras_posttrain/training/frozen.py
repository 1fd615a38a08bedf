"""Frozen companions of a policy: references and teachers."""

import contextlib
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp

from keras_posttrain._tracing import TRACING
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import guards, presets
from keras_posttrain.models.hf import directories
from keras_posttrain.models.hf.loading import repair
from keras_posttrain.models.hf.rope import (
    sequence_length_of,
    set_sequence_length,
)
from keras_posttrain.models.lora import attached
from keras_posttrain.models.policy import PACKABLE_MODELS, Policy
from keras_posttrain.models.quantized import values_of
from keras_posttrain.models.vision import sizes_of, tower_of
from keras_posttrain.training.run_state import bound_as, weights_digest


class FrozenPolicy:
    """A model that a step reads and never trains.

    Its arrays are an argument of the programs that read them.
    `frozen_model` and `frozen_policy` make one.

    Args:
        policy: `Policy` that runs it, a separate or the trained one.
        kind: `"model"` for a separate model; `"off"` for the trained policy
            with the adapter off, which takes no memory; `"copy"` for a copy
            of what is trained.
        variables: list of `keras.Variable`s that take `values`, arrays.
        weights: `ModelWeights` of the trained policy, unless `kind` is
            `"model"`.
        role: `"reference"` or `"teacher"`, the argument that users pass it as.
    """

    def __init__(
        self, policy, kind, *, role, variables=(), values=(), weights=None
    ):
        self.policy, self.kind, self.role = policy, kind, role
        self.variables, self.values = list(variables), list(values)
        self.weights = weights

    @property
    def causal_lm(self):
        """KerasHub `CausalLM` that it runs."""
        return self.policy.causal_lm

    @property
    def num_bytes(self):
        """Int, bytes of memory that the model takes."""
        return sum(x.nbytes for x in self.values)

    @contextlib.contextmanager
    def using(self, values, trainable, frozen):
        """Opens a scope in which `self.policy` has the frozen weights.

        `values` are arrays for `self.variables`; `trainable` and `frozen`
        those of the trained policy.
        """
        with TRACING, contextlib.ExitStack() as stack:
            # A step records that of the trained policy.
            stack.enter_context(self.policy.recorded_routing(False))
            if self.kind == "off":
                scope = self.weights.scope(trainable, frozen)
                stack.enter_context(scope)
                stack.enter_context(self.policy.adapter.disabled())
            else:
                mapping = list(zip(self.variables, values))
                if self.kind == "copy":
                    mapping += list(zip(self.weights.frozen, frozen))
                scope = values_of(mapping)
                stack.enter_context(scope)
            yield

    def logps(
        self, values, trainable, frozen, rows, mask=None, temperature=1.0
    ):
        """Computes log-probabilities of the tokens of some rows.

        They are float32 `(rows, length)` and 0 outside `mask`, bools of that
        shape, by default all tokens with loss. For the weights see `using`.
        """
        if mask is None:
            mask = rows["completion_mask"] != 0
        with self.using(values, trainable, frozen):
            return self.policy.token_outputs(
                rows, mask, temperature=temperature, differentiable=False
            )["per_token_logps"]

    def update(self, mixup):
        """Replaces the weights by `mixup` policy + `1 - mixup` frozen."""
        new = [v.value for v in self.variables]
        self.values = _mixed(self.values, new, mixup)

    def state(self):
        """Returns the arrays that a checkpoint has to hold."""
        kept = self.values if self.kind == "copy" else []
        return {str(i): x for i, x in enumerate(kept)}

    def set_state(self, arrays):
        """Restores the arrays of `state`."""
        if self.kind == "copy":
            self.values = [
                bound_as(old, arrays[str(i)])
                for i, old in enumerate(self.values)
            ]

    @functools.cached_property
    def digest(self):
        """Computes a checksum of a separate model's weights, else `None`."""
        return weights_digest(self.values) if self.kind == "model" else None

    def identity(self):
        """Returns a dict that identifies its weights and settings."""
        causal_lm, adapter = self.policy.causal_lm, self.policy.adapter
        if self.kind == "off":
            adapter = adapter.below
        elif self.kind == "model":
            adapter = next(reversed(attached(causal_lm)), None)
        return model_identity(causal_lm, adapter)

    def check(self, length, packing):
        """Raises a `ValueError` where the model cannot read the rows.

        A model with rotations for short and long rows takes those of
        `length`.
        """
        longest = guards.max_length(self.policy.causal_lm)
        if longest is not None and length > longest:
            raise ValueError(
                f"`{self.role}_length` must be at most {longest}, the "
                f"positions the {self.role} was made for. "
                f"Received: {self.role}_length={length}"
            )
        if self.kind == "model":
            set_sequence_length(self.policy.causal_lm, length)
        if packing and not self.policy.packable:
            raise ValueError(
                f"{type(self.policy.backbone).__name__}, the {self.role}, has "
                "no attention that keeps packed sequences apart. Use "
                f"packing=False, or as the {self.role} {PACKABLE_MODELS}."
            )


@functools.partial(jax.jit, static_argnums=2)
def _mixed(old, new, mixup):
    return [
        (mixup * n.astype("float32") + (1 - mixup) * o).astype(o.dtype)
        for o, n in zip(old, new)
    ]


class Untracked:
    """Holds a model that Keras must not track as a sublayer."""

    def __init__(self, value):
        self.value = value


def model_of(given):
    """Returns the model of a `Task`; anything else is returned as it is."""
    return getattr(given, "causal_lm", given)


def model_identity(causal_lm, adapter=None):
    """Returns a dict that identifies the weights and settings of a model."""
    variables = list(causal_lm.variables)
    if adapter is not None:
        variables += adapter.variables
    return {
        "model": type(causal_lm).__name__,
        "config": guards.architecture(causal_lm),
        "dtype": causal_lm.backbone.dtype_policy.name,
        "lora": dataclasses.asdict(adapter.lora) if adapter else None,
        "weights (checksum)": weights_digest([v.value for v in variables]),
    }


def make_reference(model, policy, weights, moves=False):
    """Returns the reference of a run, by default a `frozen_policy`.

    `model` is a preset, a KerasHub `CausalLM`, or `None` for the policy.
    """
    if model is None:
        return frozen_policy(policy, weights, moves=moves)
    if moves:
        raise ValueError(
            "Only a reference that began as the policy can be updated "
            "from it. Leave `reference=` out, or the callback that "
            "updates it."
        )
    return frozen_model(model, policy)


def frozen_policy(policy, weights, *, role="reference", moves=False):
    """Freezes the policy as it is now.

    It becomes the policy with the adapter off where the adapter is 0 now,
    else a copy of what is trained. One that is going to be updated (`moves`)
    needs a copy.
    """
    if policy.adapter and policy.adapter.is_zero and not moves:
        return FrozenPolicy(policy, "off", role=role, weights=weights)
    variables = trained_variables(policy)
    values = [jnp.array(v.value, copy=True) for v in variables]
    return FrozenPolicy(
        policy,
        "copy",
        role=role,
        variables=variables,
        values=values,
        weights=weights,
    )


def frozen_model(model, policy, *, role="reference", same_tokens=True):
    """Freezes another model, a preset or a KerasHub `CausalLM`.

    With `same_tokens` it must have the vocabulary of the trained `policy`.
    """
    if isinstance(model, (str, os.PathLike)):
        dtype = policy.backbone.dtype_policy
        vision = role == "reference" and _has_tower(policy.causal_lm, model)
        model = presets.load_companion(model, dtype, vision=vision)
    if model is policy.causal_lm:
        raise ValueError(
            f"`{role}` must be another model than the one in training: it "
            "has to stay as it is. Leave it out for the policy when training "
            "began."
        )
    if same_tokens:
        _check_vocabulary(model.backbone, policy.backbone, role)
    repair(model)
    if role == "reference":
        _check_tower(model, policy)
        set_sequence_length(model, sequence_length_of(policy.causal_lm))
    variables = model_variables(model)
    return FrozenPolicy(
        _companion(policy, model),
        "model",
        role=role,
        variables=variables,
        values=[v.value for v in variables],
    )


def _companion(policy, model):
    """Returns the `Policy` of another model in the steps of a policy."""
    return Policy(model, chunk_size=policy.chunk_size, chooser=policy.chooser)


def _has_tower(causal_lm, preset):
    """Returns whether a companion's preset is to be loaded with its tower."""
    tower = tower_of(causal_lm.backbone)
    return tower is not None and directories.resolve(preset) is not None


def _check_tower(reference, policy):
    """Raises where the policy sees images and its reference does not."""
    tower = tower_of(policy.backbone)
    theirs = tower_of(reference.backbone)
    if tower is None:
        return
    if theirs is None or sizes_of(theirs) != sizes_of(tower):
        raise ValueError(
            "The reference of a policy with a vision tower must have a tower "
            "that reads the same images. Received: a reference "
            f"{'without one' if theirs is None else 'with another'}. Load it "
            "with `vision=True`."
        )


def frozen_shapes(model, policy, weights, *, role="reference"):
    """Returns the `FrozenPolicy` that a run would have, without its values.

    `model` is as in `make_reference`, or the `FrozenPolicy` of a run that has
    begun.
    """
    if isinstance(model, FrozenPolicy):
        return FrozenPolicy(
            model.policy,
            model.kind,
            role=role,
            variables=model.variables,
            weights=model.weights,
        )
    if model is not None:
        with shapes_only():
            if isinstance(model, (str, os.PathLike)):
                dtype = policy.backbone.dtype_policy
                vision = _has_tower(policy.causal_lm, model)
                model = presets.load_companion(
                    model, dtype, load_weights=False, vision=vision
                )
            repair(model)
            own = _companion(policy, model)
        variables = model_variables(model)
        return FrozenPolicy(own, "model", role=role, variables=variables)
    if policy.adapter and policy.adapter.is_zero:
        return FrozenPolicy(policy, "off", role=role, weights=weights)
    variables = trained_variables(policy)
    return FrozenPolicy(
        policy, "copy", role=role, variables=variables, weights=weights
    )


def model_variables(causal_lm):
    """Returns the variables of a model and of the adapters on it."""
    top = attached(causal_lm)[-1:]
    return causal_lm.variables + [
        variable for adapter in top for variable in adapter.variables
    ]


def trained_variables(policy):
    """Returns the trainable variables of a model and its adapter.

    A task may train more than these, such as a value head.
    """
    owners = [x for x in (policy.causal_lm, policy.adapter) if x]
    return [v for owner in owners for v in owner.trainable_variables]


def _check_vocabulary(theirs, ours, role):
    theirs, ours = theirs.vocabulary_size, ours.vocabulary_size
    if ours == theirs:
        return
    if role == "teacher":
        raise ValueError(
            "The teacher must have the vocabulary of the student: their "
            "distributions are compared token by token. Received: a "
            f"teacher with vocabulary_size={theirs}, a student with "
            f"vocabulary_size={ours}. Use a teacher of the same family, "
            "or `kpt.losses.ULDLoss()`, which compares what has no "
            "tokens in common."
        )
    raise ValueError(
        "The reference must have the vocabulary of the policy. "
        f"Received: a reference with vocabulary_size={theirs}, a "
        f"policy with vocabulary_size={ours}."
    )
