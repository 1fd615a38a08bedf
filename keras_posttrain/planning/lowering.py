"""A task rebuilt from shapes on a planned mesh, and its step lowered."""

import contextlib
import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import placing, quantized, sharding
from keras_posttrain.models.policy import Policy
from keras_posttrain.training.frozen import FrozenPolicy, frozen_shapes
from keras_posttrain.training.step import compile_step
from keras_posttrain.training.weights import ModelWeights


@contextlib.contextmanager
def planned(task, distribution, *, remat="none", **settings):
    """Rebuilds a task from shapes, as `compile` would make it elsewhere.

    Nothing of the task is written, and Keras's distribution is set in this
    thread only: the task may train or sample in another one meanwhile.

    Args:
        task: compiled `Task`.
        distribution: `keras.distribution.Distribution`, also of devices that
            are not there.
        remat: one of `rematerialisation.CHOICES`.
        **settings: attributes of the task to replace: `micro_batch_size`,
            `sequence_length`.

    Yields:
        A `PlannedTask` with all layers.
    """
    with placing.using(None):
        # Values that a model is made with cannot be placed on devices that
        # are not there.
        companions = {
            role: tuple(
                frozen_shapes(
                    model,
                    task.policy,
                    ModelWeights.of(task),
                    role=role.removesuffix("s"),
                )
                for model in models
            )
            for role, models in task.companion_models().items()
        }
    models = [model for found in companions.values() for model in found]
    policies = [task.policy, *(model.policy for model in models)]
    with placing.using(placing.for_policies(distribution, policies)):
        settings["remat"] = remat
        yield PlannedTask.build(task, companions, settings)


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedTask:
    """A task whose weights and optimizer are shapes on a planned mesh.

    Args:
        task: a twin of the user's `Task`. It shares all attributes but those
            that the plan replaces, so that a subclass plans its own step.
        step: the twin's `TrainStep`.
        source: the user's `Task`.
        known: dict by role of tuples of `FrozenPolicy`s with all layers.
        settings: dict, the attributes that the plan replaces.
    """

    task: object
    step: object
    source: object
    known: dict
    settings: dict

    @classmethod
    def build(cls, source, known, settings, layers=None, others=None):
        """Builds the twin; the arguments are those of the class and of
        `with_layers`."""
        own, replaced = source.policy, dict(settings)
        remat = replaced.pop("remat")
        policy = Policy(
            own.causal_lm, own.adapter, remat, own.chunk_size, layers,
            chooser=own.chooser,
        )  # fmt: skip
        left_out = _left_out(policy)
        twin = object.__new__(_without(type(source), left_out))
        # Past Keras's `__setattr__`, whose tracker the twin shares.
        vars(twin).update(vars(source), policy=policy, **replaced)
        optimizer, masters = _optimizer(source, twin.trainable_variables)
        vars(twin).update(optimizer=optimizer, _masters=masters)
        companions = {
            role: tuple(
                _shallow(model, twin, left_out, others) for model in models
            )
            for role, models in known.items()
        }
        vars(twin).update(companions=companions)
        if "cached" in vars(twin):
            # The planned step runs its companions.
            vars(twin).update(cached=None)
        step = twin.make_step()
        vars(twin).update(_step=step)
        return cls(twin, step, source, known, settings)

    def with_layers(self, layers=None, others=None):
        """Builds the task with fewer decoder layers.

        Args:
            layers: int or `None` for all.
            others: int or `None`, as `layers`, of companions that are
                another model.
        """
        return self.build(
            self.source, self.known, self.settings, layers, others
        )

    @property
    def policy(self):
        """`Policy` that is trained."""
        return self.task.policy

    @property
    def companions(self):
        """List of the `FrozenPolicy`s that run in the step."""
        found = self.step.companions.values()
        return [model for models in found for model in models]

    def weights_of(self, companion=None):
        """Lists a companion's or the policy's weights of floating point.

        A companion that is the policy at another time has its weights. In
        place of codes and scales are the kernels that they stand for.
        """
        weights, policy = self.step.weights, self.policy
        variables = weights.trainable + weights.frozen
        if companion is not None and companion.kind == "model":
            variables, policy = companion.variables, companion.policy
        known, kernels = set(map(id, variables)), []
        for kernel in quantized.kernels(policy.causal_lm):
            own = set(map(id, kernel.variables))
            if own <= known:
                known -= own
                kernels.append(kernel)
        return kernels + [
            v
            for v in variables
            if id(v) in known and jnp.issubdtype(v.dtype, jnp.floating)
        ]

    def num_parameters(self):
        """Counts numbers, as the two fields of a `Plan`."""
        every, trained = self.weights_of(), self.step.weights.trainable
        return {
            "parameters": sum(math.prod(v.shape) for v in every),
            "trainable_parameters": sum(math.prod(v.shape) for v in trained),
        }

    def shapes(self, batch):
        """Returns the arguments of the step on a batch of numpy arrays.

        They are `(changing, held, batch)`, as in `compile_step`, of
        `jax.ShapeDtypeStruct`s.
        """
        distribution, step = keras.distribution.distribution(), self.step
        changing = {
            "trainable": shapes_of(step.weights.trainable),
            "optimizer": shapes_of(step.optimizer.variables),
            "metrics": shapes_of(
                [v for t in step.train_trackers for v in t.variables]
            ),
        }
        held = {"frozen": shapes_of(step.weights.frozen)}
        for role, models in step.companions.items():
            held[role] = [shapes_of(model.variables) for model in models]

        def row(x):
            layout = distribution.get_data_layout(x.shape).backend_layout
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

        return changing, held, jax.tree.map(row, batch)

    @property
    def options(self):
        """The compiler's options for the training step, or `None`."""
        models = [self.task.causal_lm, *(x.causal_lm for x in self.companions)]
        return quantized.compiler_options(*models)

    def lower(self, batch):
        """Lowers the training step to a `jax.stages.Lowered`."""
        changing, held, batch = self.shapes(batch)
        out = jax.tree.map(lambda x: x.sharding, changing)
        counters = {"step": np.int32(1), "seed": np.int32(0)}
        program = compile_step(self.task.train_step, out, options=self.options)
        return program.lower({**changing, **counters}, held, batch)


def shapes_of(variables):
    """Lists the shapes, dtypes and layouts of variables on the mesh."""
    return [
        jax.ShapeDtypeStruct(
            variable.shape,
            getattr(variable, "stored_dtype", variable.dtype),
            sharding=sharding.layout_of(variable).backend_layout,
        )
        for variable in variables
    ]


def num_bytes(shapes, itemsize=None):
    """Sums the bytes of arrays on the device that has most of them.

    Args:
        shapes: pytree of `jax.ShapeDtypeStruct`s with a layout.
        itemsize: int, bytes of a number, or `None` for that of each dtype.
    """
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape))
            * (itemsize or _itemsize(x.dtype))
            for x in jax.tree.leaves(shapes)
        )
    )


def _itemsize(dtype):
    # NumPy says that int4 takes a byte.
    return 0.5 if dtype == jnp.int4 else dtype.itemsize


# The parts of a twin


def _left_out(policy):
    """Returns the ids of the variables of decoder layers that do not run."""
    if policy.num_layers is None:
        return frozenset()
    rest = []
    for layer in policy.backbone.transformer_layers[policy.num_layers :]:
        rest += layer.variables + policy.adapter_variables(layer)
    return frozenset(map(id, rest))


def _without(task_class, left_out):
    """Returns a class of tasks that has all variables but those left out."""

    class Twin(task_class):
        @property
        def variables(self):
            return [v for v in super().variables if id(v) not in left_out]

    Twin.__name__ = task_class.__name__
    return Twin


def _optimizer(task, variables):
    """Returns an optimizer of shapes for these variables, and its masters."""
    layouts = [sharding.layout_of(variable) for variable in variables]
    # Its scalars have values, which no planned device can hold.
    with placing.using(None), shapes_only():
        optimizer = optimizers.unbuilt_copy(task.optimizer)
        shapes = [
            placing.shape_alone(*pair) for pair in zip(variables, layouts)
        ]
        return optimizer, optimizers.build(optimizer, shapes)


def _shallow(frozen, twin, left_out, layers):
    """Copies a companion for a twin, with fewer layers if separate."""
    policy, weights = twin.policy, ModelWeights.of(twin)
    if frozen.kind == "model":
        policy, weights = copy.copy(frozen.policy), None
        policy.num_layers = layers
        left_out = _left_out(policy)
    return FrozenPolicy(
        policy,
        frozen.kind,
        role=frozen.role,
        variables=[v for v in frozen.variables if id(v) not in left_out],
        weights=weights,
    )
