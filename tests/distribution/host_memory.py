"""A script in its own process: peaks of memory while files move.

`host_memory.py FOLDER`, with eight devices.
"""

import json
import pathlib
import re
import sys

if __name__ == "__main__":
    import tests.distribution.unused  # noqa: F401

import keras
import numpy as np

from keras_posttrain.models import presets, quantized
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.export import export
from keras_posttrain.models.lora import Adapter, LoRA
from tests.distribution.runs import mesh
from tests.support import REFERENCE

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 11,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def make_model(folder):
    """A random Llama of 400 MB in bfloat16, in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, width = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 4, hidden),
            "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    dtypes = dict.fromkeys(shapes, "bfloat16")
    shards = checkpoint_files.plan_shards(shapes, dtypes, 50 * 2**20)
    noise = np.random.default_rng(0).normal(0, 0.02, 2**26).astype("float32")
    arrays = (
        noise[: np.prod(shapes[name])].reshape(shapes[name])
        for names in shards.values()
        for name in names
    )
    checkpoint_files.write_tensors(folder, shards, shapes, dtypes, arrays)
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


def memory(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", text)[1])


def peak(function):
    """Returns the result of `function()` and its peak memory."""
    # The peak from here on.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    return function(), memory("VmHWM") - before


def bytes_of(model):
    """Returns the bytes that the devices hold of a model."""
    return sum(
        shard.data.nbytes
        for v in model.variables
        for shard in v.value.addressable_shards
    )


def main(folder):
    """Peaks of loading and writing; these devices are in host memory."""
    size = make_model(folder / "model")
    # What the first model brings: KerasHub's modules and programs.
    first = presets.load_causal_lm(REFERENCE / "models/llama3")
    presets.save_to_preset(first, folder / "first")
    keras.distribution.set_distribution(mesh("4x2"))
    model, most = peak(
        lambda: presets.load_causal_lm(
            folder / "model",
            dtype="bfloat16",
            quantization=quantized.Quantization("int4"),
        )
    )
    codes, codes_held = most, bytes_of(model)
    model = None
    model, most = peak(
        lambda: presets.load_causal_lm(folder / "model", dtype="bfloat16")
    )
    held = bytes_of(model)
    adapter = Adapter(model, LoRA(rank=4))
    found = {
        "int4 devices": codes_held / size,
        "int4 load": codes / size,
        "load": most / size,
        "devices": held / size,
        "export": peak(
            lambda: export(
                model, folder / "out", values=adapter.merged_values()
            )
        )[1]
        / size,
        "preset": peak(
            lambda: presets.save_to_preset(model, folder / "preset", adapter)
        )[1]
        / size,
    }
    model = adapter = None
    found["load preset"] = (
        peak(
            lambda: presets.load_causal_lm(folder / "preset", dtype="bfloat16")
        )[1]
        / size
    )
    print({key: round(value, 2) for key, value in found.items()}, flush=True)
    # All of the model, once, and a few tensors: the largest is a twelfth.
    assert found["devices"] < 1.01, found
    for key, most in {
        # The codes that stay, and no copy of the floats.
        "int4 load": found["int4 devices"] + 0.3,
        "load": 1.35,
        "load preset": 1.5,
        "export": 0.5,
        "preset": 0.5,
    }.items():
        assert found[key] < most, (key, found)
    print("equal")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
