"""A user's script: models from files onto meshes of eight devices, and back.

`sharded_files.py CASE...`, a case being `load:directory`, `export:directory`,
`preset:directory` of `tests/reference/models`, or `memory:FOLDER`.
"""

import json
import pathlib
import re
import sys
import tempfile

import jax
import keras
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.models import presets
from keras_posttrain.models.hf import checkpoint_files
from keras_posttrain.models.hf.export import export
from keras_posttrain.models.lora import Adapter, LoRA
from tests.distribution.same_numbers import mesh
from tests.support import REFERENCE


def models(preset, meshes, **kwargs):
    """The model on one device, then on each mesh: `(name, model)`."""
    for name in (None, *meshes):
        distribution = name and mesh(name)
        keras.distribution.set_distribution(distribution)
        yield name, presets.load_causal_lm(preset, **kwargs)


def check_values(preset, meshes, **kwargs):
    """Every variable, bit for bit, and where it lies."""
    want = None
    for name, model in models(preset, meshes, **kwargs):
        got = [np.asarray(v.value) for v in model.variables]
        want = want or got
        for v, x, y in zip(model.variables, got, want, strict=True):
            assert x.dtype == v.value.dtype == jax.numpy.dtype(v.dtype)
            assert x.tobytes() == y.tobytes(), (name, v.path)
            if name:
                distribution = keras.distribution.distribution()
                layout = distribution.get_variable_layout(v).backend_layout
                lies = v.value.sharding
                assert lies.is_equivalent_to(layout, v.ndim), (name, v.path)
                assert v._layout.backend_layout == layout
        # What KerasHub compiles has values too.
        state = [*model.optimizer.variables, *model.sampler.variables]
        assert all(isinstance(v._value, jax.Array) for v in state)
        assert model.kpt_repairs is not None


def check_load(family):
    path = REFERENCE / "models" / family
    check_values(path, ["4x2", "1x8", "dp"])
    check_values(path, ["2x4"], dtype="bfloat16")


def filled_adapter(model):
    adapter = Adapter(model, LoRA(rank=4))
    rng = np.random.default_rng(0)
    for b in adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    return adapter


def same_files(one, other):
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        same = (one / name).read_bytes() == (other / name).read_bytes()
        assert same, name


def check_export(family):
    """One device's files and a mesh's: byte by byte."""
    path = REFERENCE / "models" / family
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        merged = {}
        for name, model in models(path, ["4x2"]):
            out = folder / str(name)
            out.mkdir()
            export(model, out / "plain", max_shard_bytes=100_000)
            export(model, out / "half", dtype="bfloat16")
            adapter = filled_adapter(model)
            adapter.save(out / "adapter")
            values = adapter.merged_values()
            for pair in adapter.pairs:
                kernel = pair.layer.kernel
                lies = values(kernel).sharding
                assert lies.is_equivalent_to(
                    kernel.value.sharding, kernel.ndim
                )
            export(model, out / "merged", values=values)
            tensors = checkpoint_files.Reader(out / "merged")
            merged[name] = {x: tensors.get(x) for x in tensors.shapes}
            before = [np.asarray(v.value) for v in adapter.variables]
            for v in adapter.variables:
                v.assign(np.zeros(v.shape, "float32"))
            adapter.load(out / "adapter")
            for v, x in zip(adapter.variables, before, strict=True):
                assert (np.asarray(v.value) == x).all()
                assert (
                    v.value.sharding.is_equivalent_to(
                        v._layout.backend_layout, 2
                    )
                    if name
                    else True
                )
        for kind in ("plain", "half", "adapter"):
            same_files(folder / "None" / kind, folder / "4x2" / kind)
        # A sum over the rank, in an order that goes by the shapes.
        for name, x in merged[None].items():
            y = merged["4x2"][name]
            np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)


def check_preset(family):
    """KerasHub's format: written from a mesh, and read on others."""
    path = REFERENCE / "models" / family
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, model in models(path, ["4x2"]):
            presets.save_to_preset(model, folder / str(name))
        one, other = (
            [np.asarray(v.value) for v in presets.load_causal_lm(p).variables]
            for p in (folder / "None", folder / "4x2")
        )
        assert all((x == y).all() for x, y in zip(one, other, strict=True))
        check_values(folder / "4x2", ["1x8"])


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
    """What `function()` returns, and the most memory that it took."""
    # The peak from here on.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    return function(), memory("VmHWM") - before


def check_memory(folder):
    """Peaks of loading and of writing; devices here lie in host memory."""
    folder = pathlib.Path(folder)
    size = make_model(folder / "model")
    # What the first model brings: KerasHub's modules, programs.
    presets.load_causal_lm(REFERENCE / "models/llama3")
    keras.distribution.set_distribution(mesh("4x2"))
    model, most = peak(
        lambda: presets.load_causal_lm(folder / "model", dtype="bfloat16")
    )
    held = sum(
        shard.data.nbytes
        for v in model.variables
        for shard in v.value.addressable_shards
    )
    adapter = filled_adapter(model)
    found = {
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
        "load": 1.35,
        "load preset": 1.5,
        "export": 0.5,
        "preset": 0.5,
    }.items():
        assert found[key] < most, (key, found)


def main(cases):
    assert jax.device_count() == 8
    for case in cases:
        kind, argument = case.split(":", 1)
        globals()[f"check_{kind}"](argument)
        print(case, flush=True)
    print("equal")


if __name__ == "__main__":
    assert kpt
    main(sys.argv[1:])
