"""gpt-oss: what its files and KerasHub's presets have that others have not.

`test_loading.py`, `test_export.py` and `test_families.py` compare it as every
family.
"""

import json

import jax
import keras_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import keras_posttrain as kpt
from keras_posttrain.models.activation_capture import ActivationCapture
from keras_posttrain.models.experts import compute_chosen_experts
from keras_posttrain.models.hf.checkpoint_files import SINGLE, Reader
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.hf.quantized_files import format_of
from keras_posttrain.models.key_values import KeyValues, joined_keys
from keras_posttrain.models.policy import Policy
from tests.models.quantized_checkpoints import MXFP4
from tests.models.test_experts import assert_close
from tests.models.tiny_checkpoints import (
    TOKEN_IDS,
    assert_equal_logits,
    make_checkpoint,
    packed_logits,
    randomize,
    transformers_logits,
)

MXFP4_CONFIG = {"quant_method": "mxfp4"}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A directory whose experts are in MXFP4, and transformers' logits."""
    experts = MXFP4()
    directory, want = make_checkpoint(
        tmp_path_factory.mktemp("mxfp4") / "hf",
        "gpt_oss",
        change=experts,
        intermediate_size=32,
    )
    experts.write(directory)
    return directory, want


def test_mxfp4_is_what_transformers_reads(tmp_path):
    """Every code, and scales beyond those of float16; in bfloat16 exactly."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 6, 2, 16), "uint8")
    scales = rng.integers(100, 150, (3, 6, 2), "uint8")
    arrays = {"m_blocks": blocks, "m_scales": scales}
    save_file(arrays, tmp_path / SINGLE)
    found = format_of({"quantization_config": MXFP4_CONFIG})
    reader = Reader(tmp_path)
    assert found.is_stored(reader, "m") and not found.is_stored(reader, "n")
    # The shape of `(experts, in, out)`, reversed.
    got = found.floats(reader, "m", (6, 64, 3)).T
    want = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    assert got.shape == (3, 64, 6)
    np.testing.assert_array_equal(got.astype("float32"), want.numpy())
    with pytest.raises(ValueError, match=r"of shape \(3, 6, 3, 16\)"):
        found.floats(reader, "m", (6, 96, 3))


def test_experts_in_mxfp4_are_read_and_said(quantized, capsys):
    directory, want = quantized
    causal_lm = load_causal_lm(directory)
    said = capsys.readouterr().out
    assert "MXFP4: 4 layers were read as floats (codes are kept of" in said
    assert not [x for x in causal_lm.kpt_repairs if "not used" in x]
    assert_equal_logits(packed_logits(causal_lm), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_has_floats(quantized, tmp_path, dtype):
    """That transformers reads bit for bit, and no trace of the codes."""
    directory, _ = quantized
    task = kpt.SFTTask.from_preset(directory, sequence_length=20, dtype=dtype)
    task.export(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == dtype
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=getattr(torch, dtype)
    )
    assert isinstance(model, transformers.GptOssForCausalLM)
    state = model.state_dict()
    stored = load_file(directory / SINGLE)
    for name in [n.removesuffix("_blocks") for n in stored if "_blocks" in n]:
        codes = (stored.pop(f"{name}_{x}") for x in ("blocks", "scales"))
        stored[name] = convert_moe_packed_tensors(
            *map(torch.tensor, codes), dtype=torch.float32
        ).numpy()
    assert set(state) == set(stored)
    for name, value in stored.items():
        want = torch.tensor(value).to(state[name].dtype)
        # transformers keeps norms in float32.
        want = want.to(getattr(torch, dtype)).to(state[name].dtype)
        assert torch.equal(state[name], want), name


def test_a_preset_of_kerashub(quantized, tmp_path):
    """Without our config: its windows are in the wrong layers."""
    directory, want = quantized
    source = load_causal_lm(directory)
    source.save_to_preset(str(tmp_path / "preset"))
    causal_lm = load_causal_lm(tmp_path / "preset")
    assert causal_lm.kpt_source is None
    notes = " | ".join(causal_lm.kpt_repairs)
    assert "sliding_window set to (4, None)" in notes
    assert "factor of the rotation" in notes
    assert_equal_logits(packed_logits(causal_lm), want)
    task = kpt.SFTTask(causal_lm, sequence_length=20)
    task.export(tmp_path / "hf")
    assert_equal_logits(transformers_logits(tmp_path / "hf"), want)


def test_kerashubs_experts_have_the_same_values_and_gradients():
    """Of all experts for every token, where the limit is reached."""
    backbone = keras_hub.models.GptOssBackbone(
        vocabulary_size=96,
        num_layers=1,
        hidden_dim=32,
        num_query_heads=4,
        num_key_value_heads=2,
        intermediate_dim=48,
        num_experts=5,
        top_k=3,
    )
    causal_lm = keras_hub.models.GptOssCausalLM(backbone, preprocessor=None)
    [layer] = randomize(causal_lm).backbone.transformer_layers
    block = layer.sparse_moe_block
    x = 2 * jax.random.normal(jax.random.key(0), (2, 40, 32))
    weight = jax.random.normal(jax.random.key(1), x.shape)
    values = [v.value for v in block.trainable_variables]
    assert len(values) == 6

    @jax.jit
    def loss(values, x):
        (out, _), _ = block.stateless_call(values, [], x)
        return jax.numpy.sum(weight * out), out

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    want = run(values, x)
    jax.clear_caches()
    compute_chosen_experts(layer)
    got = run(values, x)
    # The sum itself is of terms that cancel.
    assert_close((got[0][1], got[1]), (want[0][1], want[1]), 3e-6)
    gate_up = np.einsum("bth,ehm->etm", x[:1], block.experts.gate_up_proj)
    assert (np.abs(gate_up) > block.experts.limit).mean() > 0.01


def plain_batch():
    rows, length = TOKEN_IDS.shape
    return {
        "token_ids": TOKEN_IDS,
        "segment_ids": np.ones_like(TOKEN_IDS),
        "positions": np.tile(np.arange(length), (rows, 1)),
    }


def test_attention_without_what_the_sinks_take(quantized):
    """What a distillation of attention compares is transformers' own."""
    directory, _ = quantized
    policy = Policy(load_causal_lm(directory))
    capture = ActivationCapture(attention_layers=(0, 1))
    policy.hidden_states(plain_batch(), capture=capture)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        found = model(torch.tensor(TOKEN_IDS), output_attentions=True)
    for layer in (0, 1):
        got = np.array(capture.attentions[layer])
        assert got.sum(-1).max() < 1
        want = found.attentions[layer].numpy()
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_tokens_after_a_cache_are_those_of_whole_rows(quantized):
    """The keys of a layer hang on the sinks and windows of those before."""
    policy = Policy(load_causal_lm(quantized[0]))
    rows, length = TOKEN_IDS.shape
    batch, first = plain_batch(), 9
    shape = (rows, length, 2, 12)
    whole = [
        [x.reshape(shape) for x in pair]
        for pair in jax.jit(policy.prefill)(batch)
    ]
    past = [
        KeyValues.zeros(rows, length + 2, *shape[2:], k.dtype).fill(
            np.arange(rows), k[:, :first], v[:, :first]
        )
        for k, v in whole
    ]
    found = jax.jit(policy.extend)(
        TOKEN_IDS[:, first:],
        batch["positions"][:, first:],
        past,
        np.arange(rows),
        np.full(rows, length - first),
    )
    for layer, (keys, values) in zip(found, whole, strict=True):
        got = joined_keys(layer.keys)[..., :length].transpose(0, 3, 1, 2)
        np.testing.assert_allclose(got, keys, atol=2e-5)
        got = layer.values[:, :, :length].transpose(0, 2, 1, 3)
        np.testing.assert_allclose(got, values, atol=2e-5)


def test_another_epsilon_than_vllms_is_refused(quantized):
    task = kpt.SFTTask.from_preset(quantized[0], sequence_length=20)
    engine = kpt.rollout.VLLMRollout()
    engine.set_model(task)
    with pytest.raises(
        ValueError, match="NativeRollout.*'rms_norm_eps': 1e-06"
    ):
        engine.start()
    assert engine._folder is None
