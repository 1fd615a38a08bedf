"""vLLM on TPUs in the trainer's process, with KerasHub's layers.

Written against tpu-inference 0.32 and KerasHub 0.32 (`keras_hub.vllm`). The
mapping of weights is tested on a CPU; it has not run on a TPU.
"""

import os
import pathlib

import jax
import keras

from keras_posttrain.models import presets
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.rollout.vllm import weights as vllm_weights
from keras_posttrain.rollout.vllm.jobs import Job
from keras_posttrain.rollout.vllm.local import LocalEngine, engine_failures

# KerasHub's vLLM plugin finds the model class by these names.
ARCHITECTURE = "KerasHubForCausalLM"
MODEL_TYPE = "keras_hub"
# The fields of the config from which vLLM computes the size of its cache.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# The engine always ranks this many tokens at each position.
MAX_LOGPROBS = 20


def is_here():
    """Returns whether this process computes on TPUs."""
    return jax.default_backend() == "tpu"


def check():
    """Checks that Keras was imported with support for Flax NNX."""
    if not keras.config.is_nnx_enabled():
        raise RuntimeError(
            "In a process with TPUs vLLM runs KerasHub's model by Flax. Set "
            "the environment variable KERAS_NNX_ENABLED=true before Keras is "
            "imported, or use `python=` with an interpreter of another "
            "environment. Received: keras.config.is_nnx_enabled()=False"
        )


def write_model(causal_lm, directory, dtype):
    """Writes the config and the preset that KerasHub's vLLM model reads.

    KerasHub's `setup_vllm_model` does this only for a named preset with a
    tokenizer. `dtype` is the engine's.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    preset = directory / "preset"
    presets.save_to_preset(causal_lm, preset)
    sizes = hf_config(causal_lm, dtype=dtype)
    config = {name: sizes[name] for name in SIZES if name in sizes}
    heads = config["num_attention_heads"]
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config |= {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "keras_hub_preset": str(preset),
        "torch_dtype": dtype,
    }
    checkpoint_files.write_json(directory / checkpoint_files.CONFIG, config)


def arguments(found):
    """Changes vLLM's engine arguments for TPUs."""
    return found | {
        "load_format": "auto",
        "max_logprobs": MAX_LOGPROBS,
        # Only the temperature is processed: `_job` rejects truncation.
        "logprobs_mode": "processed_logprobs",
    }


class TPUWeights(vllm_weights.Weights):
    """Weights under KerasHub's names, as arrays on the devices."""

    def shapes(self):
        variables = self.causal_lm.backbone.variables
        return {v.path: list(v.shape) for v in variables}

    def arrays(self):
        """Yields `(path, array)`, JAX arrays in the trainer's dtype."""
        values = self._values()
        for variable in self.causal_lm.backbone.variables:
            yield variable.path, values(variable)


class TPUEngine(LocalEngine):
    """A tpu-inference engine in this process.

    All weights are loaded, with an adapter merged in. Samples do not depend
    on a request's seed: the engine has one seed for all.
    """

    def _make(self):
        # This imports vLLM, which is optional.
        from keras_hub.vllm import KerasHubLLM

        # With this variable vLLM might use its PyTorch model.
        os.environ.pop("MODEL_IMPL_TYPE", None)
        return KerasHubLLM(**self.arguments).llm_engine

    def _prepare(self):
        self.device = "tpu"

    def tensors(self):
        [found, *_] = self._engine.collective_rpc(
            lambda worker: {
                path: list(leaf.shape)
                for path, leaf in _variables(worker.model_runner.state).items()
            }
        )
        return found

    def push(self, weights, version):
        """Loads all weights and returns the bytes moved."""
        with engine_failures("the weights"):
            # This comes first because the prefix cache refers to blocks of
            # the cache that `write_state` frees.
            self._reset_prefix_cache()
            [moved, *_] = self._engine.collective_rpc(
                lambda worker: write_state(worker, weights.arrays())
            )
            self._set_version(version)
        return moved

    def run(self, jobs, on_tokens=None, interrupted=None, more=None):
        yield from super().run(
            _jobs(jobs),
            on_tokens,
            interrupted,
            None if more is None else lambda: _jobs(more()),
        )


def write_state(worker, arrays):
    """Replaces the weights of tpu-inference's `TPUWorker`; returns the bytes.

    The cache of keys and values belongs to the old weights. It is freed
    first, which makes room for both sets of weights, and recreated at the
    end. `arrays` has `(path, array)` of each variable of the KerasHub model;
    if one of the engine's variables is not among them, it raises a
    `ValueError`.
    """
    runner, given = worker.model_runner, {}
    worker.delete_kv_cache()
    # Wait for steps that still read the old weights.
    jax.effects_barrier()
    places = _variables(runner.state)
    for path, array in arrays:
        old = places[path].value
        # The array is copied because the trainer's next step donates it.
        given[path] = jax.device_put(
            array.astype(old.dtype), old.sharding, may_alias=False
        )
    left = [path for path in places if path not in given]
    if left:
        raise ValueError(f"No weights were given for {left[:3]}.")
    structure = jax.tree_util.tree_structure(runner.state)
    leaves = [given[path] for path in places]
    runner.state = jax.tree_util.tree_unflatten(structure, leaves)
    runner.refresh_state_leaves()
    # Otherwise the model would keep the memory of its initial weights.
    for variable in runner.model.backbone.variables:
        variable.assign(given[variable.path])
    worker.reinitialize_kv_cache()
    return sum(array.nbytes for array in leaves)


def _variables(state):
    """Returns KerasHub's variables in a Flax state, by path."""
    leaves = jax.tree_util.tree_leaves(
        state, is_leaf=lambda node: isinstance(node, keras.Variable)
    )
    return {leaf.path: leaf for leaf in leaves}


def _jobs(jobs):
    return {key: _job(job) for key, job in jobs.items()}


def _job(job):
    """Adapts a job to tpu-inference.

    A `ValueError` names settings whose log-probabilities would differ.
    """
    params = job.params
    cut = params.get("top_k") or params.get("min_p")
    if cut or params.get("top_p", 1.0) < 1:
        raise ValueError(
            "On TPUs vLLM's log-probabilities are renormalised over what "
            "`top_k`, `top_p` and `min_p` keep. Do not set them, or use "
            f"`NativeRollout`. Received: {params}"
        )
    ranked = params.get("prompt_logprobs")
    if ranked is not None:
        if params["temperature"] != 1:
            raise ValueError(
                "On TPUs vLLM scores at temperature 1 only. Received: "
                f"temperature={params['temperature']}"
            )
        if ranked > MAX_LOGPROBS:
            raise ValueError(
                f"On TPUs vLLM ranks {MAX_LOGPROBS} tokens at most. "
                f"Received: top_k={ranked}"
            )
    return Job(job.token_ids, params | {"seed": None})
