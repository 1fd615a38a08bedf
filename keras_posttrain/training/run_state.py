"""The state of a run other than its weights: saved and restored."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.models import guards


@dataclasses.dataclass
class RunState:
    """Training progress of a task, kept from one `fit` to the next.

    Attributes:
        step: int, optimizer steps done.
        logs: dict of scalars, those of the last step.
        first_step: int, steps done before this run.
        consumed: int, batches that this process has trained on since it
            began or resumed.
        resumed: bool, whether a checkpoint was restored and no step done
            since.
        keep_metrics: bool, whether the next epoch continues the running
            means of a checkpoint.
        digest: int or `None`, a checksum of the frozen weights, once known.
    """

    step: int = 0
    logs: dict = dataclasses.field(default_factory=dict)
    seed: int = 0
    first_step: int = 0
    consumed: int = 0
    resumed: bool = False
    keep_metrics: bool = False
    initial_epoch: int | None = None
    digest: int | None = None

    def begin(self, seed):
        """Begins a run at the current step."""
        self.seed, self.first_step = seed, self.step
        self.consumed, self.resumed, self.keep_metrics = 0, False, False
        self.initial_epoch = self.digest = None

    def frozen_digest(self, weights):
        """Computes a checksum of the frozen weights, not checkpointed."""
        if self.digest is None:
            self.digest = weights_digest([v.value for v in weights.frozen])
        return self.digest

    def restore(self, meta, epochs):
        """Continues from the `meta` of a checkpoint, to `epochs` epochs."""
        self.step = meta["step"]
        self.first_step = meta["step"] - meta["data"]["step"]
        self.consumed, self.resumed = 0, True
        self.keep_metrics = meta["in_epoch"]
        self.initial_epoch = epochs if meta["stopped"] else meta["epoch"]


@dataclasses.dataclass
class Saved:
    """The variables and companions of a run, as a checkpoint holds them.

    `trackers` hold the running means; `frozen` has `FrozenPolicy`s by name.
    """

    weights: object
    optimizer: object
    trackers: list
    frozen: dict

    @classmethod
    def of(cls, step, frozen):
        """Returns the `Saved` of a `TrainStep` and its frozen models."""
        return cls(step.weights, step.optimizer, step.train_trackers, frozen)

    def variables(self):
        """Returns a dict of lists of variables."""
        return {
            "trainable": self.weights.trainable,
            "optimizer": self.optimizer.variables,
            "metrics": [v for t in self.trackers for v in t.variables],
        }

    def arrays(self):
        """Returns a dict of dicts of arrays."""
        found = {
            name: {str(i): v.value for i, v in enumerate(variables)}
            for name, variables in self.variables().items()
        }
        return found | {n: model.state() for n, model in self.frozen.items()}

    def assign(self, arrays):
        """Puts the arrays back."""
        for name, variables in self.variables().items():
            for i, variable in enumerate(variables):
                array = arrays[name][str(i)]
                variable.assign(bound_as(variable.value, array))
        for name, model in self.frozen.items():
            model.set_state(arrays[name])


def bound_as(old, new):
    """Returns an array that is bound to its device only if another is.

    What is read from a checkpoint is, what a program has computed is not, and
    JAX compiles a program again where that changes.
    """
    if old.committed or not isinstance(new, jax.Array):
        return new
    # Its first piece is another object, which keeps no copy on the host.
    return jax.device_put(np.asarray(new.addressable_data(0)), may_alias=False)


def fingerprint(name, policy, weights, digest, optimizer, **settings):
    """Returns settings that must match for a run to be resumed.

    `name` is that of the task's class, `digest` a checksum of the frozen
    weights; `settings` are others, fit for JSON.
    """
    lora = policy.adapter.lora if policy.adapter else None
    shapes = [list(v.shape) for v in weights.trainable]
    checksum = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    found = {
        "task": name,
        "model": type(policy.causal_lm).__name__,
        "config": guards.architecture(policy.causal_lm),
        "lora": dataclasses.asdict(lora) if lora else None,
        "trainable shapes (checksum)": checksum,
        "frozen weights (checksum)": digest,
        "optimizer": type(optimizer).__name__,
        **settings,
        "optimizer_variables": len(optimizer.variables),
    }
    # As JSON gives it back: tuples are lists.
    return json.loads(json.dumps(found, default=float))


def check(meta, fingerprint, seed, directory, override=()):
    """Raises a `ValueError` for the checkpoint of another run.

    `override` names settings of the optimizer that may differ. Those that do
    are returned, a dict by name of `(theirs, ours)`.
    """
    theirs = meta["run"]
    differing = [k for k in fingerprint if fingerprint[k] != theirs.get(k)]
    allowed = {f"optimizer's {name}": name for name in override}
    changed = {
        allowed[key]: (theirs.get(key), fingerprint[key])
        for key in differing
        if key in allowed
    }
    differing = [key for key in differing if key not in allowed]
    if differing:
        key = differing[0]
        hint = ""
        if key.startswith("optimizer's "):
            name = key.removeprefix("optimizer's ")
            hint = (
                f" To go on with the new {name}, pass "
                f"`Checkpoint(..., override=[{name!r}])`."
            )
        raise ValueError(
            f"{str(directory)!r} holds a run whose {key} differs from "
            f"this task's. There: {theirs.get(key)!r}. "
            f"Here: {fingerprint[key]!r}. Use another directory, or the "
            f"settings of that run.{hint}"
        )
    if meta["seed"] != seed:
        raise ValueError(
            f"{str(directory)!r} holds a run with seed={meta['seed']}. "
            f"Received: seed={seed}. Use that seed, or another "
            "directory."
        )
    return changed


def weights_digest(values):
    """Returns an int that tells lists of arrays apart by all of their bits."""
    return int(_digest(values)) if values else 0


@jax.jit
def _digest(values):
    total = jnp.uint32(0)
    for i, x in enumerate(values):
        total += _share(x, jnp.uint32(i))
    return total


# Of layers with the same shapes only the first is traced.
@jax.jit
def _share(x, i):
    """Returns what the `i`th array adds to the checksum."""
    x = bits(x)
    return jnp.sum(_mixed(x + _mixed(_places(x.shape) + _mixed(i))))


def bits(x):
    """Returns the bits of an array as uint32, for a checksum."""
    kinds = {1: "uint8", 2: "uint16", 4: "uint32"}
    kind = kinds.get(x.dtype.itemsize)
    if kind is None or x.dtype == bool:
        return x.astype("float32").view("uint32")
    return jax.lax.bitcast_convert_type(x, kind).astype("uint32")


def _places(shape):
    """Returns the place of each number in the flat array.

    Not by flattening: each device would receive the whole of a sharded array.
    """
    places, stride = jnp.zeros(shape, "uint32"), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota("uint32", shape, axis)
        places += along * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    return places


def _mixed(x):
    """32 bits, each of which depends on all bits of the input.

    A weighted sum of the bits alone would miss weights that were all doubled:
    the changes of their exponents add up to a multiple of 2**32. The mixing
    is that of MurmurHash3, by Appleby (public domain).
    """
    x = jnp.uint32(x)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
