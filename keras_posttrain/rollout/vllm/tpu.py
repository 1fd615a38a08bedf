"""vLLM on TPUs, in the process of the trainer, with KerasHub's own layers.

Written against tpu-inference 0.32 and KerasHub 0.32 (`keras_hub.vllm`). Its
mapping is tested on a CPU; it has not run on a TPU.
"""

import os
import pathlib

import jax
import keras

from keras_posttrain.models import presets
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.rollout.vllm import weights as vllm_weights
from keras_posttrain.rollout.vllm.jobs import EngineFailure, Job
from keras_posttrain.rollout.vllm.local import LocalEngine, failing

# Names of KerasHub's, by which its plugin of vLLM finds the model class.
ARCHITECTURE = "KerasHubForCausalLM"
MODEL_TYPE = "keras_hub"
# What vLLM sizes its cache by.
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
# The engine ranks so many tokens at each place, whether asked for or not.
MAX_LOGPROBS = 20


def is_here(rollout):
    """Whether a `VLLMRollout` runs on this process's TPUs."""
    in_process = rollout.url is None and rollout.python is None
    return in_process and jax.default_backend() == "tpu"


def check():
    """Refuses an environment whose Keras has no weights for Flax.

    Raises:
        RuntimeError: says what to set.
    """
    if not keras.config.is_nnx_enabled():
        raise RuntimeError(
            "In a process with TPUs vLLM runs KerasHub's model by Flax. Set "
            "the environment variable KERAS_NNX_ENABLED=true before Keras is "
            "imported, or use `python=` with an interpreter of another "
            "environment. Received: keras.config.is_nnx_enabled()=False"
        )


def write_model(task, directory, dtype):
    """Writes what KerasHub's class reads: a config, and a preset beside it.

    KerasHub's `setup_vllm_model` does so for a preset by its name; it wants
    the preset's tokenizer, which is of no use here.

    Args:
        task: the task.
        directory: path of a folder, new or empty.
        dtype: str, the engine's dtype.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    preset = directory / "preset"
    presets.save_to_preset(task.causal_lm, preset)
    sizes = hf_config(task.causal_lm, dtype=dtype)
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
    """vLLM's engine arguments for a TPU, from those for elsewhere."""
    return found | {
        "load_format": "auto",
        "max_logprobs": MAX_LOGPROBS,
        # Of a temperature alone: `_job` refuses what else there is.
        "logprobs_mode": "processed_logprobs",
    }


class TPUWeights(vllm_weights.Weights):
    """A task's weights under KerasHub's names, as they lie on the devices."""

    def shapes(self):
        variables = self.task.causal_lm.backbone.variables
        return {v.path: list(v.shape) for v in variables}

    def arrays(self):
        """Yields `(path, array)`, JAX arrays in the trainer's dtype."""
        values = self._values()
        for variable in self.task.causal_lm.backbone.variables:
            yield variable.path, values(variable)


class TPUEngine(LocalEngine):
    """tpu-inference in this process.

    All weights are given, an adapter added to them on the way. Samples are
    not keyed by a request's seed: the engine has one for all.
    """

    def _make(self):
        from keras_hub.vllm import KerasHubLLM

        # Else the model of PyTorch may be taken.
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
        """Gives all weights; bytes moved."""
        with failing("the weights"):
            # First: its blocks are those of the cache that goes.
            if not self._engine.reset_prefix_cache():
                raise EngineFailure("vLLM did not drop its cache of prefixes.")
            [moved, *_] = self._engine.collective_rpc(
                lambda worker: write_state(worker, weights.arrays())
            )
            self._is_now(version)
        return moved

    def run(self, jobs, *args, **kwargs):
        jobs = {key: _job(job) for key, job in jobs.items()}
        yield from super().run(jobs, *args, **kwargs)


def write_state(worker, arrays):
    """Puts weights in the place of those that a worker's runner has.

    The cache of keys and values is of the old ones: it goes before, which
    makes room for both sets of weights, and is made anew after.

    Args:
        worker: tpu-inference's `TPUWorker`.
        arrays: iterable of `(path, array)`, each of KerasHub's variables once.

    Returns:
        int, bytes written.

    Raises:
        ValueError: if a variable of the engine's is not given.
    """
    runner, given = worker.model_runner, {}
    worker.delete_kv_cache()
    # Steps that still read the old weights end first.
    jax.effects_barrier()
    places = _variables(runner.state)
    for path, array in arrays:
        old = places[path].value
        # A copy: the trainer's next step gives its own array away.
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
    # Which would keep the memory of those that it was loaded with.
    for variable in runner.model.backbone.variables:
        variable.assign(given[variable.path])
    worker.reinitialize_kv_cache()
    return sum(array.nbytes for array in leaves)


def _variables(state):
    """KerasHub's variables in a state of Flax's, by path, as its leaves."""
    leaves = jax.tree_util.tree_leaves(
        state, is_leaf=lambda node: isinstance(node, keras.Variable)
    )
    return {leaf.path: leaf for leaf in leaves}


def _job(job):
    """What tpu-inference does of a job.

    Raises:
        ValueError: for what its log-probabilities are not ours under.
    """
    params = job.params
    cut = params.get("top_k") or params.get("min_p")
    if cut or params.get("top_p", 1.0) < 1:
        raise ValueError(
            "On TPUs vLLM's log-probabilities are renormalised over what "
            "`top_k`, `top_p` and `min_p` leave. Sample without them, or use "
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
