"""What a run is made of, beside its weights: taken and put back."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.distribution import processes
from keras_posttrain.models import guards
from keras_posttrain.training import step as steps


class Resumable(keras.Model):
    """The state of a run, as `kpt.callbacks.Checkpoint` saves it."""

    # Whether a checkpoint can be taken: a rollout that is cut into steps is
    # not saved in its middle, where the weights no longer are those that
    # sampled it.
    at_rest = True

    def at_epoch_end(self):
        """Whether the step just done was the last of its epoch."""
        size = self.data.epoch_size
        if not size:
            return False
        done = self.data.state_after(self._consumed)["step"]
        left = range(done + 1, -(-done // size) * size + 1)
        return all(step in self._skip_steps for step in left)

    def training_state(self):
        """What a checkpoint holds: `(arrays, meta)`, meta fit for JSON."""
        arrays = {
            "trainable": self.trainable_variables,
            "optimizer": self.optimizer.variables,
            "metrics": self._train_trackers_variables(),
        }
        arrays = {
            name: {str(i): v.value for i, v in enumerate(variables)}
            for name, variables in arrays.items()
        }
        meta = {
            "step": self.step,
            "seed": self._seed,
            "data": self.data_state(),
            "run": self.fingerprint(),
        }
        return arrays, meta

    def data_state(self):
        """The place in the data, fit for JSON."""
        return self.data.state_after(self._consumed)

    def _train_trackers_variables(self):
        return [v for t in self._train_trackers for v in t.variables]

    def fingerprint(self):
        """What must be the same for a run to be the same run."""
        lora = self.adapter.lora if self.adapter else None
        shapes = [list(v.shape) for v in self.trainable_variables]
        # As JSON gives it back: tuples are lists.
        return json.loads(
            json.dumps(
                {
                    "task": type(self).__name__,
                    "model": type(self.causal_lm).__name__,
                    "config": guards.architecture(self.causal_lm),
                    "lora": dataclasses.asdict(lora) if lora else None,
                    "trainable shapes (checksum)": hashlib.sha256(
                        repr(shapes).encode()
                    ).hexdigest()[:16],
                    "frozen weights (checksum)": self._frozen_digest(),
                    "optimizer": type(self.optimizer).__name__,
                    "optimizer_variables": len(self.optimizer.variables),
                    "loss": repr(self.objective),
                    "max_grad_norm": self.max_grad_norm,
                }
            )
        )

    def agreement(self):
        """What must be the same in all processes of a run, fit for JSON."""
        return {
            **self.fingerprint(),
            **{f"data {k}": v for k, v in self.data.fingerprint.items()},
            "seed": self._seed,
            "epochs": self._epochs,
            "skip_steps": sorted(self._skip_steps),
            "micro_batch_size": self.micro_batch_size,
            "step": self.step,
            "callbacks": [
                type(c).__name__
                for c in self.fit_callbacks
                # The first process alone may show one.
                if not isinstance(c, Progress)
            ],
        }

    def _frozen_digest(self):
        """A checksum of the frozen weights, which no checkpoint holds."""
        if self._digest is None:
            values = [v.value for v in self.non_trainable_variables]
            self._digest = weights_digest(values)
        return self._digest

    def check_training_state(self, meta, directory):
        """Refuses the checkpoint of another run, naming both."""
        ours, theirs = self.fingerprint(), meta["run"]
        differing = [k for k in ours if ours[k] != theirs.get(k)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{str(directory)!r} holds a run whose {key} differs from "
                f"this task's. There: {theirs.get(key)!r}. "
                f"Here: {ours[key]!r}. Use another directory, or the "
                "settings of that run."
            )
        if meta["seed"] != self._seed:
            raise ValueError(
                f"{str(directory)!r} holds a run with seed={meta['seed']}. "
                f"Received: seed={self._seed}. Use that seed, or another "
                "directory."
            )

    def restore_training_state(self, arrays, meta):
        """Puts the task where `training_state` was taken."""
        self.data.set_state(meta["data"])
        groups = {
            "trainable": self.trainable_variables,
            "optimizer": self.optimizer.variables,
            "metrics": self._train_trackers_variables(),
        }
        for name, variables in groups.items():
            for i, variable in enumerate(variables):
                variable.assign(arrays[name][str(i)])
        self.step = meta["step"]
        self._step_base = meta["step"] - meta["data"]["step"]
        self._consumed, self._resumed = 0, True
        # Running means go on in the middle of an epoch.
        self._keep_metrics = meta["in_epoch"]
        self._initial_epoch = meta["epoch"]
        if meta["stopped"]:
            self._initial_epoch = self._epochs

    def get_weights(self):
        """All weights, whole in every process: EarlyStopping keeps them."""
        values = processes.fetch([v.value for v in self.weights])
        return [np.array(x) for x in values]

    def reset_metrics(self):
        if self._keep_metrics and not self._evaluating:
            self._keep_metrics = False
            return
        super().reset_metrics()


def weights_digest(values):
    """An int that tells lists of arrays apart by all of their bits."""

    def digest(values):
        total = jnp.uint32(0)
        for i, x in enumerate(values):
            bits = steps.bits(x)
            mixed = _mixed(bits + _mixed(_places(bits.shape) + _mixed(i)))
            total += jnp.sum(mixed)
        return total

    return int(jax.jit(digest)(values)) if values else 0


def _places(shape):
    """The place of each number in the flat array.

    Not by flattening: an array over a mesh would come whole to each device.
    """
    places, stride = jnp.zeros(shape, "uint32"), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota("uint32", shape, axis)
        places += along * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    return places


def _mixed(x):
    """32 bits, each of which depends on all that were given.

    A weighted sum of bits as they are would miss weights that were all
    doubled: the change of their exponents adds up to a multiple of 2**32.
    The mixing is that of MurmurHash3, by Appleby (public domain).
    """
    x = jnp.uint32(x)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
