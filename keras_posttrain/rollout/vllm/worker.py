"""Extensions that run in vLLM's processes.

This file imports nothing of `keras_posttrain`: a server in another
environment gets only a copy of it. torch, vLLM and safetensors are imported
in functions, because importing them is slow and they may be missing in the
trainer's environment. Written for vLLM 0.32 and its first model runner.

As a script the file starts a server for `VLLMRollout(url=...)`. Its options
are those of vLLM's server, and the server's key is in VLLM_API_KEY:

    python worker.py --model /models/qwen3 --port 8000
"""

import concurrent.futures
import json
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
import zlib

# The files of a difference; `difference.py` describes them.
INDEX, DATA = "difference.json", "difference.bin"
# The name under which vLLM's processes import a copy of this file.
MODULE = "kpt_vllm_worker"
# Environment variables that a server needs.
ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
# Options that a server needs.
OPTIONS = (
    "--served-model-name", "policy",
    "--worker-extension-cls", f"{MODULE}.RolloutWorkerExtension",
    "--middleware", f"{MODULE}.RequireKey",
    "--enable-scale-out",
)  # fmt: skip
# Those that `VLLMRollout` passes to servers that it starts, with others.
OWN_OPTIONS = (
    "--skip-tokenizer-init",
    "--generation-config", "vllm",
    "--max-logprobs", "-1",
    "--logprobs-mode", "raw_logprobs",
)  # fmt: skip
SERVER = "vllm.entrypoints.openai.api_server"
# The ends of the names of gpt-oss's tensors of all experts.
GPT_OSS_EXPERTS = tuple(
    f".mlp.experts.{part}_proj{end}"
    for part in ("gate_up", "down")
    for end in ("", "_bias")
)


class RolloutWorkerExtension:
    """Methods that vLLM adds to its workers, called by name.

    Set by `LLM(worker_extension_cls=...)` or `--worker-extension-cls`.
    """

    def kpt_prepare(self):
        """Makes log-probabilities those of the full distribution.

        vLLM has log-probabilities before the temperature, or renormalised
        over the tokens that top-k, top-p and min-p keep. Those of a prompt's
        tokens are always before the temperature. Here both are at the
        request's temperature (at 1 if that is 0) and over the full
        vocabulary. Returns a dict with the type of `device`.
        """
        runner = self.model_runner
        if not getattr(runner, "_kpt_prepared", False):
            _sample_with_full_logprobs(runner.sampler)
            _score_at_temperature(runner)
            _skip_lora_of_head(runner.get_model())
            runner._kpt_prepared = True
        return {"device": self.device.type}

    def kpt_tensors(self):
        """Returns names and shapes of all weights, as in a checkpoint."""
        model = self.model_runner.get_model()
        packed = getattr(model, "packed_modules_mapping", {})
        found = {}
        for name, module in model.named_modules():
            if not hasattr(module, "base_layer"):
                name = _checkpoint_name(name.replace(".base_layer", ""))
                found.update(_checkpoint_shapes(name, module, packed))
        for name in _values_of_keys(self.model_runner.model_config):
            found.pop(name, None)
        return found

    def kpt_load(self, directory, version=None):
        """Loads the weights in a directory of safetensors files.

        With the name of a `version`, a copy of the tensors is kept in this
        process's memory, at which `kpt_load_difference` can begin.
        """
        from safetensors import safe_open

        kept, self._kpt_kept = {}, None

        def tensors():
            for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():
                        tensor = opened.get_tensor(name)
                        if version is not None:
                            kept[name] = tensor = tensor.clone()
                        yield name, tensor

        answer = self.kpt_load_tensors(tensors())
        if version is not None:
            self._kpt_kept = version, kept
        return answer

    def kpt_load_difference(self, directory):
        """Loads the kept weights with a difference applied to them.

        Returns:
            As `kpt_load`, or a dict with `refused`, the reason why the
            difference does not fit: then no weights were loaded and none are
            kept. With data parallelism it raises an error instead.
        """
        import torch

        kept, self._kpt_kept = getattr(self, "_kpt_kept", None), None
        index = json.loads((pathlib.Path(directory) / INDEX).read_text())
        if kept is None:
            return self._kpt_refusal("it has kept no weights")
        version, tensors = kept
        if version != index["base"]:
            return self._kpt_refusal(f"it has kept version {version!r}")
        arrays = {
            name: tensor.view(-1).view(torch.uint8).numpy()
            for name, tensor in tensors.items()
        }
        wrong = apply_difference(directory, index, arrays)
        if wrong:
            return self._kpt_refusal(f"checksums differ, of {wrong[:3]}")
        answer = self.kpt_load_tensors(iter(tensors.items()))
        self._kpt_kept = index["version"], tensors
        return answer

    def _kpt_refusal(self, reason):
        if self.parallel_config.data_parallel_size > 1:
            # Of several engines vLLM returns the first one's answer alone,
            # but the errors of all.
            raise RuntimeError(f"The difference does not fit: {reason}")
        return {"refused": reason}

    def kpt_load_arrays(self, arrays):
        """Loads the weights of an iterator of `(name, numpy array)`."""
        import torch

        def tensors():
            for name, array in arrays:
                if array.dtype.name == "bfloat16":
                    # torch does not support NumPy arrays of bfloat16.
                    bits = torch.from_numpy(array.view("uint16"))
                    yield name, bits.view(torch.bfloat16)
                else:
                    yield name, torch.from_numpy(array)

        return self.kpt_load_tensors(tensors())

    def kpt_load_tensors(self, tensors):
        """Loads the weights of an iterator of `(name, tensor)`."""
        count, sinks = 0, {}

        def counted():
            nonlocal count
            for pair in tensors:
                count += 1
                yield pair

        loadable = _split_gpt_oss(counted(), sinks)
        self.reload_weights(weights_iterator=loadable)
        self._kpt_repack()
        if sinks:
            _load_sinks(self.model_runner.get_model(), sinks)
        return {"tensors": count}

    def _kpt_repack(self):
        # On a CPU the head has a packed copy of its matrix, and experts have
        # theirs packed. Reloading weights does not pack again if the head is
        # tied to the embedding, nor experts.
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            VocabParallelEmbedding,
        )

        for module in self.model_runner.get_model().modules():
            is_table = isinstance(module, VocabParallelEmbedding)
            if is_table and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
            if hasattr(module, "w13_weight"):
                experts = module.quant_method.moe_kernel.fused_experts
                experts.process_weights_after_loading(module)


def apply_difference(directory, index, arrays):
    """Applies a difference to arrays, in place.

    Args:
        directory: path of its folder.
        index: dict, the content of its index.
        arrays: dict of the old tensors' bytes, flat numpy arrays of uint8.

    Returns:
        A list of the names of tensors that do not have the checksum of the
        new weights afterwards.
    """
    path, entries = pathlib.Path(directory) / DATA, index["tensors"]
    names = sorted(entries.keys() & arrays.keys())

    def is_wrong(name):
        try:
            _apply(path, entries[name], arrays[name])
        except (IndexError, OSError, ValueError, zlib.error):
            return True
        return zlib.crc32(arrays[name]) != entries[name]["checksum"]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [n for n, bad in zip(names, pool.map(is_wrong, names)) if bad]
    return wrong + sorted(entries.keys() ^ arrays.keys())


def _apply(path, entry, array):
    """Applies the difference of one tensor to its bytes."""
    # vLLM needs it, but this file is imported without vLLM too.
    import numpy as np

    size = entry["stop"] - entry["start"]
    if not size:
        return
    data = np.fromfile(path, "uint8", size, offset=entry["start"])
    if not entry["gap_bits"]:
        array[:] = data
        return
    planes = np.frombuffer(zlib.decompress(data), "uint8")
    gap_bytes, flip_bytes = entry["gap_bits"] // 8, entry["bits"] // 8
    rows = planes.reshape(gap_bytes + flip_bytes, -1)
    gaps, flips = (
        np.ascontiguousarray(part.T).view(f"uint{8 * len(part)}").reshape(-1)
        for part in (rows[:gap_bytes], rows[gap_bytes:])
    )
    places = np.cumsum(gaps, dtype="int64") - 1
    array.view(f"uint{entry['bits']}")[places] ^= flips


def copy(directory):
    """Copies this file to a folder, for vLLM's processes to import."""
    shutil.copy(__file__, pathlib.Path(directory) / f"{MODULE}.py")


def serve(options):
    """Replaces this process by a vLLM server with such further options."""
    if not os.environ.get("VLLM_API_KEY"):
        sys.exit(
            "Set VLLM_API_KEY to a secret of your own: whoever has it can "
            "change the weights and run code on this machine. Pass it to "
            "`VLLMRollout(url=..., api_key=...)` too."
        )
    # Another file in this folder could hide a module that vLLM imports.
    folder = tempfile.mkdtemp(prefix="kpt-vllm-worker-")
    copy(folder)
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-m", SERVER, *OPTIONS, *OWN_OPTIONS, *options]
    os.execve(sys.executable, command, environment)


def share_cpu(threads):
    """Limits torch's use of a CPU in the trainer's process to `threads`.

    If KerasHub has imported vLLM already, it is too late for environment
    variables.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    # Compiling parts of the sampler would take ten seconds.
    torch.compiler.set_stance("force_eager")


def prepare_thread():
    """Gives the calling thread torch's number of threads.

    OpenMP counts by the calling thread, and torch sets its count at a thread's
    first operation. vLLM reads it before that, and would fail there.
    """
    import torch

    torch.get_num_threads()


class RequireKey:
    """ASGI middleware that requires the key for all paths but `/health`.

    vLLM's `--api-key` does not protect the paths that change weights.
    """

    def __init__(self, app):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        kind = scope["type"]
        is_open = kind == "http" and scope["path"] == "/health"
        if kind == "lifespan" or is_open:
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        elif kind == "http":
            start = {"type": "http.response.start", "status": 401}
            await send({**start, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            # Before a websocket is accepted this answers with status 403.
            await send({"type": "websocket.close", "code": 1008})


def _sample_with_full_logprobs(sampler):
    import torch

    plain = sampler.sample

    def sample(logits, metadata, *args, **kwargs):
        logprobs = None
        if metadata.max_num_logprobs is not None:
            scaled = logits
            if not metadata.all_greedy:
                temperature = metadata.temperature
                greedy = temperature < 1e-5
                temperature = torch.where(greedy, 1.0, temperature)
                scaled = logits / temperature.unsqueeze(1)
            logprobs = sampler.compute_logprobs(scaled)
        sampled, _ = plain(logits, metadata, *args, **kwargs)
        return sampled, logprobs

    sampler.sample = sample


def _score_at_temperature(runner):
    sampler, plain = runner.sampler, runner._get_prompt_logprobs_dict
    compute = sampler.compute_logprobs

    def at(temperature):
        divisor = 1.0 if temperature < 1e-5 else temperature
        return lambda logits: compute(logits / divisor)

    def scores(hidden_states, num_scheduled_tokens):
        every, found = runner.num_prompt_logprobs, {}
        try:
            for name, count in list(every.items()):
                if name not in runner.requests:
                    continue
                params = runner.requests[name].sampling_params
                sampler.compute_logprobs = at(params.temperature)
                runner.num_prompt_logprobs = {name: count}
                found.update(plain(hidden_states, num_scheduled_tokens))
                if not runner.num_prompt_logprobs:
                    every.pop(name)
        finally:
            runner.num_prompt_logprobs = every
            sampler.compute_logprobs = compute
        return found

    runner._get_prompt_logprobs_dict = scores


def _skip_lora_of_head(model):
    # Our adapters do not change the head. vLLM would add zeros to its logits,
    # by indices of sampled tokens that do not match the tokens of a prompt.
    for module in model.modules():
        if type(module).__name__ == "LogitsProcessorWithLoRA":
            module.punica_wrapper.add_lora_logits = lambda y, *_, **__: y


def _checkpoint_name(name):
    """Returns a checkpoint's name of a module; only gpt-oss has another."""
    name = f"{name}.".replace(".attn.", ".self_attn.")
    return name.replace(".embedding.", ".embed_tokens.")[:-1]


def _values_of_keys(model_config):
    """Yields names of weights that Gemma 4's checkpoints lack.

    Where values are keys, vLLM has the weights of keys twice.
    """
    config = model_config.hf_text_config
    if getattr(config, "attention_k_eq_v", False):
        for i, kind in enumerate(config.layer_types):
            if kind == "full_attention":
                yield f"model.layers.{i}.self_attn.v_proj.weight"


def _split_gpt_oss(tensors, sinks):
    """Yields `(name, tensor)` as vLLM can load it again.

    vLLM's loader of gpt-oss copies stacked experts and sinks by itself, and
    what it copies in a reload is lost. Experts one by one are not. Sinks are
    added to the dict `sinks`.
    """
    for name, tensor in tensors:
        parent, _, last = name.rpartition(".")
        if name.endswith(".self_attn.sinks"):
            sinks[name] = tensor
        elif name.endswith(GPT_OSS_EXPERTS):
            for i, own in enumerate(tensor):
                yield f"{parent}.{i}.{last}", own
        else:
            yield name, tensor


def _load_sinks(model, sinks):
    """Copies the sinks of attention of a dict into vLLM's model."""
    from vllm.distributed import get_tensor_model_parallel_rank

    for name, module in model.named_modules():
        tensor = sinks.get(f"{_checkpoint_name(name)}.sinks")
        if tensor is None:
            continue
        heads = len(module.sinks)
        start = get_tensor_model_parallel_rank() * heads
        # Attention may hold a copy in another dtype.
        for held in (module.sinks, module.attn.impl.sinks):
            held.data.copy_(tensor[start : start + heads])


def _checkpoint_shapes(name, module, packed):
    """Returns a checkpoint's names and shapes for a module of vLLM."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    parent, _, last = name.rpartition(".")
    if isinstance(module, VocabParallelEmbedding):
        shape = [module.org_vocab_size, module.embedding_dim]
        return {f"{name}.weight": shape}
    if isinstance(module, linear.LinearBase):
        inputs, sizes = module.input_size, [module.output_size]
        if isinstance(module, linear.QKVParallelLinear):
            inputs, kv_heads = module.hidden_size, module.total_num_kv_heads
            sizes = [
                module.total_num_heads * module.head_size,
                kv_heads * module.head_size,
                kv_heads * module.v_head_size,
            ]
        elif isinstance(module, linear.MergedColumnParallelLinear):
            sizes = module.output_sizes
        lasts, found = packed.get(last, [last]), {}
        if len(lasts) == 1:
            # A module that the checkpoint fuses too, such as Phi-3's.
            sizes = [sum(sizes)]
        for part, size in zip(lasts, sizes, strict=True):
            part = f"{parent}.{part}" if parent else part
            found[f"{part}.weight"] = [size, inputs]
            if module.bias is not None:
                found[f"{part}.bias"] = [size]
        return found
    own = dict(module.named_parameters(recurse=False))
    if "w13_weight" in own:
        return _expert_shapes(name.removesuffix(".routed_experts"), module)
    if hasattr(module, "layer_scalar"):
        # A buffer of Gemma 4's layers.
        own["layer_scalar"] = module.layer_scalar
    return {f"{name}.{key}": list(value.shape) for key, value in own.items()}


def _expert_shapes(name, module):
    """Returns a checkpoint's names and shapes for vLLM's experts."""
    count = module.global_num_experts
    _, hidden, width = module.w2_weight.shape
    if hasattr(module, "w13_bias"):
        # gpt-oss.
        return {
            f"{name}.gate_up_proj": [count, hidden, 2 * width],
            f"{name}.gate_up_proj_bias": [count, 2 * width],
            f"{name}.down_proj": [count, width, hidden],
            f"{name}.down_proj_bias": [count, hidden],
        }
    parts = ("gate_proj", "up_proj", "down_proj")
    if "block_sparse_moe" in name:
        # Mixtral's names.
        parts = ("w1", "w3", "w2")
    elif not name.endswith(".mlp.experts"):
        # Gemma 4.
        return {
            f"{name}.gate_up_proj": [count, 2 * width, hidden],
            f"{name}.down_proj": [count, hidden, width],
        }
    shapes = ([width, hidden], [width, hidden], [hidden, width])
    return {
        f"{name}.{i}.{part}.weight": shape
        for i in range(count)
        for part, shape in zip(parts, shapes)
    }


if __name__ == "__main__":
    serve(sys.argv[1:])
