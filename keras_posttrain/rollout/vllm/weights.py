"""Writes the config and the weights for vLLM, and verifies them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.data.batches.assembly import Segment
from keras_posttrain.distribution import processes
from keras_posttrain.distribution.led import Led
from keras_posttrain.models import sharding
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.adapter_files import WEIGHTS_FILE
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.models.hf.tensors import arrays_of, model_tensors
from keras_posttrain.rollout.native.decoding import (
    Placement,
    model_inputs,
    using,
)

# The values of vLLM's `max_lora_rank`.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The largest difference allowed between log-probabilities of the engine and
# the trainer, by the engine's dtype. Measured: 8e-5 in float32 and 0.09 in
# bfloat16.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
HEAD = "lm_head.weight"
PROBE_LENGTH = 48
MAX_SHARD_BYTES = 5 * 2**30


class Weights:
    """The weights of a model as Hugging Face tensors, computed one at a time.

    `dtype` is the engine's. If `merged`, the adapter is added to the kernels;
    else they are those of the base. With several processes all compute them,
    in work of `led`.
    """

    def __init__(self, causal_lm, adapter, dtype, merged, led=None):
        self.causal_lm, self.adapter = causal_lm, adapter
        self.dtype, self.merged = dtype, merged
        self.table = {t.name: t for t in model_tensors(causal_lm)}
        self.is_tied = HEAD not in self.table
        self._led = led or Led()
        self._led.add("weights", self._arrays)

    def shapes(self):
        """Returns a dict from names to shapes (lists of ints)."""
        return {name: list(t.shape) for name, t in self.table.items()}

    @property
    def num_bytes(self):
        size = jnp.dtype(self.dtype).itemsize
        return size * sum(int(np.prod(s)) for s in self.shapes().values())

    def _values(self):
        adapter = self.adapter
        if adapter is None:
            return lambda variable: variable.value
        if self.merged:
            return adapter.merged_values()
        base = {
            id(kernel): value
            for pair in adapter.pairs
            if pair.base is not None
            for kernel, value in zip(pair.kernels, pair.base)
        }
        return lambda variable: base.get(id(variable), variable.value)

    def arrays(self, names=None):
        """Yields `(name, array)`, numpy arrays in the engine's dtype.

        `names` is a list of tensors, by default of all.
        """
        return self._led.together("weights", names)

    def _arrays(self, names):
        dtype = jnp.dtype(self.dtype)
        wanted = self.table if names is None else names
        tensors = (self.table[name] for name in wanted)
        for name, array in arrays_of(tensors, self._values()):
            yield name, array.astype(dtype, copy=False)

    def write(self, directory, arrays=None):
        """Writes safetensors files with one tensor in memory at a time.

        `arrays` is a dict of all tensors, if they were computed before.
        """
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True)
        dtypes = dict.fromkeys(self.table, self.dtype)
        shapes = {name: t.shape for name, t in self.table.items()}
        shards = checkpoint_files.plan_shards(shapes, dtypes, MAX_SHARD_BYTES)
        order = [name for names in shards.values() for name in names]
        if arrays is None:
            found = (array for _, array in self.arrays(order))
        else:
            found = (arrays[name] for name in order)
        checkpoint_files.write_tensors(
            directory, shards, shapes, dtypes, found
        )

    def check(self, expected):
        """Checks that an engine's model has the same weights.

        `expected` has the shapes of the engine's weights by name. A
        `ValueError` names weights that only one has, or whose shapes differ.
        """
        own = self.shapes()
        if self.is_tied:
            expected = {k: v for k, v in expected.items() if k != HEAD}
        missing = sorted(expected.keys() - own.keys())
        unknown = sorted(own.keys() - expected.keys())
        shapes = [
            f"{name}: {own[name]} here, {list(expected[name])} there"
            for name in sorted(own.keys() & expected.keys())
            if own[name] != list(expected[name])
        ]
        if missing or unknown or shapes:
            raise ValueError(
                "vLLM's model must have the weights of the task's. Received: "
                f"{len(missing)} only there {missing[:3]}, {len(unknown)} "
                f"only here {unknown[:3]}, {len(shapes)} of another shape "
                f"{shapes[:3]}"
            )


def write_config(causal_lm, directory, dtype):
    """Writes the `config.json` from which vLLM builds the model."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(causal_lm, dtype=dtype)
    checkpoint_files.write_json(directory / checkpoint_files.CONFIG, config)


def adapter_bytes(directory):
    """Returns the bytes of the weights of an adapter in PEFT's format."""
    return (pathlib.Path(directory) / WEIGHTS_FILE).stat().st_size


def room_for_rank(rank):
    """Returns the least `max_lora_rank` of vLLM for a rank, or `None`."""
    return next((r for r in RANKS if r >= rank), None)


class Probe:
    """A sequence whose log-probabilities identify the weights of an engine.

    It has at most `length` tokens.
    """

    def __init__(self, policy, using_weights, length):
        self.policy, self._using_weights = policy, using_weights
        vocabulary = policy.backbone.vocabulary_size
        rng = np.random.default_rng(20)
        count = max(2, min(PROBE_LENGTH, length))
        self.token_ids = rng.integers(0, vocabulary, count).tolist()
        self._run = jax.jit(
            self._logps,
            static_argnums=0,
            out_shardings=sharding.of_results(),
        )

    def __call__(self, weights):
        """Computes the trainer's log-probabilities, float32 `(tokens,)`.

        The first is 0.
        """
        length, adapter = len(self.token_ids), self.policy.adapter
        batch = model_inputs(
            [[Segment(self.token_ids)]], length, Placement(1).shards
        )
        adapted = adapter is not None and not adapter.is_merged
        return processes.fetch(self._run(adapted, weights, batch))[0]

    def _logps(self, adapted, weights, batch):
        with using(self.policy, self._using_weights, adapted, weights):
            outputs = self.policy.token_outputs(
                batch, batch["segment_ids"] > 0, differentiable=False
            )
        return outputs["per_token_logps"]


def compare(found, expected, dtype):
    """Returns the largest difference of a probe's log-probabilities.

    If it exceeds the tolerance, a `RuntimeError` shows both numbers.
    """
    gap = np.abs(np.asarray(found, "float64") - expected)
    worst = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf)))
    if not gap[worst] <= TOLERANCES[dtype]:
        raise RuntimeError(
            "The engine does not sample from the trainer's weights: for the "
            f"probe's token {worst} the engine says log-probability "
            f"{found[worst]:.6f}, the trainer {expected[worst]:.6f}; at most "
            f"{TOLERANCES[dtype]} apart was expected in {dtype}. The run "
            "stops, so as not to train on samples of another policy."
        )
    return float(gap[worst])
