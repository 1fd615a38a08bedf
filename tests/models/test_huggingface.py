"""Names and shapes, both ways, and finding the directory."""

import json
import shutil
import time

import keras_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file

from keras_posttrain.models.hf import directories
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.models.hf.families import FAMILIES, family_of
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.hf.tensors import linear_layers, model_tensors
from tests.models.tiny_checkpoints import make_checkpoint

MODELS = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3_text",
    "llama": "llama3",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
PARTS = ("phi3", "mixtral", "qwen2_moe", "qwen3_moe")
PROJECTIONS = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}


@pytest.fixture(params=MODELS)
def loaded(request, reference):
    path = reference / "models" / MODELS[request.param]
    return path, load_causal_lm(path)


@pytest.fixture(scope="module", params=[*MODELS, *PARTS])
def any_loaded(request, reference, tmp_path_factory):
    """Also models whose tensors are parts of variables, or several."""
    if request.param in MODELS:
        path = reference / "models" / MODELS[request.param]
    else:
        folder = tmp_path_factory.mktemp("hf") / "model"
        path, _ = make_checkpoint(folder, request.param)
    return path, load_causal_lm(path)


def test_tensors_cover_the_checkpoint_and_the_model(any_loaded):
    """Every tensor of the file, every number of the model, once."""
    path, causal_lm = any_loaded
    stored = load_file(path / "model.safetensors")
    table = model_tensors(causal_lm)
    assert sorted(t.name for t in table) == sorted(stored)
    counts = {id(v): np.zeros(v.shape, int) for v in
              causal_lm.backbone.variables}  # fmt: skip
    for tensor in table:
        want = stored[tensor.name]
        assert tensor.shape == want.shape
        assert (tensor.to_hf(lambda v: np.array(v.value)) == want).all()
        for part, start in zip(tensor.parts, tensor.starts):
            here = part.take(np.array(part.variable.value))
            part.take(counts[id(part.variable)])[...] += 1
            whole = (slice(None),) * here.ndim
            got = part.read(want, whole, start, tensor.axis)
            assert (got == here).all()
    assert all((count == 1).all() for count in counts.values())


def test_a_part_of_a_variable_is_a_part_of_the_file(any_loaded):
    """Any part, of inner axes too; little more than it is read."""
    path, causal_lm = any_loaded
    rng = np.random.default_rng(0)

    class Counting:
        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, ranges):
            assert all(type(r.start) is int for r in ranges)
            found = self.stored[ranges]
            self.read = found.size
            return found

    stored = load_file(path / "model.safetensors")
    pieces = [
        (tensor, *piece)
        for tensor in model_tensors(causal_lm)
        for piece in zip(tensor.parts, tensor.starts)
    ]
    for tensor, piece, start in pieces:
        here = piece.take(np.array(piece.variable.value))
        source = Counting(stored[tensor.name])

        def read(part, piece=piece, source=source, at=(start, tensor.axis)):
            return piece.read(source, tuple(part), *at)

        for _ in range(4):
            ends = [sorted(rng.choice(n + 1, 2, False)) for n in here.shape]
            part = tuple(slice(*map(int, pair)) for pair in ends)
            assert (read(part) == here[part]).all()
        # A device's share of heads or features: no more than that is read.
        for axis, size in enumerate(here.shape):
            part = [slice(None)] * here.ndim
            part[axis] = slice(size // 2, size)
            got = read(part)
            assert (got == here[tuple(part)]).all()
            groups = [axes for axes in piece.axes if axis in axes]
            if groups and groups[0][0] == axis:
                assert source.read == got.size


def test_linear_layers_multiply_as_their_matrices(loaded):
    """`layer(x)` is `x @ weight.T + bias` for the tensor of its name."""
    path, causal_lm = loaded
    stored = load_file(path / "model.safetensors")
    layers = linear_layers(causal_lm)
    num_layers = causal_lm.backbone.num_layers
    assert set(layers) == {
        f"model.layers.{i}.{name}"
        for i in range(num_layers)
        for name in PROJECTIONS
    }
    rng = np.random.default_rng(0)
    for name, layer in layers.items():
        weight = stored[f"{name}.weight"]
        x = rng.normal(size=(2, 3, weight.shape[1])).astype("float32")
        want = x @ weight.T + stored.get(f"{name}.bias", 0.0)
        if name.endswith("o_proj"):
            x = x.reshape(*x.shape[:2], *layer.kernel.shape[:2])
        got = np.array(layer(x)).reshape(want.shape)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_family_of(loaded):
    path, causal_lm = loaded
    config = json.loads((path / "config.json").read_text())
    assert family_of(causal_lm) is FAMILIES[config["model_type"]]


def gpt2():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=32,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=16,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


@pytest.mark.parametrize(
    "function",
    [model_tensors, linear_layers, hf_config],
)
def test_a_family_without_a_table(function):
    with pytest.raises(ValueError, match="class GPT2Backbone"):
        function(gpt2())


def test_a_gemma_of_neither_kind():
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=32,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=16,
        head_dim=4,
        use_post_ffw_norm=True,
    )
    causal_lm = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    assert family_of(causal_lm) is None


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_quantized_weights_have_no_tensors(reference):
    causal_lm = load_causal_lm(reference / "models/llama3")
    layer = causal_lm.backbone.transformer_layers[1]
    layer._feedforward_gate_dense.quantize("int8")
    with pytest.raises(ValueError, match="quantization_mode='int8'"):
        model_tensors(causal_lm)


def test_resolve(reference, tmp_path):
    path = reference / "models/llama3"
    assert directories.resolve(path) == path
    assert directories.resolve(str(path)) == path
    assert directories.resolve("qwen3_0.6b_en") is None
    assert directories.resolve("kaggle://keras/gemma/keras/x") is None
    (tmp_path / "config.json").write_text('{"registered_name": "x"}')
    assert directories.resolve(tmp_path) is None


def test_resolve_of_the_hub(reference, tmp_path, monkeypatch):
    """From the hub's cache, as there is no network here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, source in (("them/llama", "llama3"), ("us/keras", None)):
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text("0" * 40)
        snapshot = folder / "snapshots" / ("0" * 40)
        if source:
            shutil.copytree(reference / "models" / source, snapshot)
        else:
            snapshot.mkdir(parents=True)
            (snapshot / "config.json").write_text('{"registered_name": 1}')
    found = directories.resolve("hf://them/llama")
    assert (found / "model.safetensors").is_file()
    assert load_causal_lm("hf://them/llama").kpt_source["path"] == str(found)
    assert directories.resolve("hf://us/keras") is None


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch, caplog):
    """One try, and what is cached is used; nothing listens at port 9."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(ValueError) as error:
        directories.resolve("hf://them/llama")
    for part in ("'hf://them/llama'", "127.0.0.1:9", "cannot be reached"):
        assert part in str(error.value)
    snapshot = tmp_path / "models--them--llama" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    assert directories.resolve("hf://them/llama") == snapshot
    assert time.monotonic() - begin < 2 and not caplog.messages


def test_resolve_refuses(tmp_path):
    with pytest.raises(ValueError, match="preset='no_such_preset'"):
        directories.resolve("no_such_preset")
    with pytest.raises(ValueError, match="hf://owner/name"):
        directories.resolve("hf://only_a_name")
    with pytest.raises(ValueError, match="must hold `config.json`"):
        directories.resolve(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        directories.resolve(tmp_path)
