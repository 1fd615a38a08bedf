"""LoRA as published, its masks, and PEFT's files both ways."""

import copy
import dataclasses
import gc
import json
import shutil

import jax
import jax.numpy as jnp
import keras
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from safetensors.numpy import load_file, save_file

import keras_posttrain as kpt
from keras_posttrain.models.hf import loading
from keras_posttrain.models.hf.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from keras_posttrain.models.hf.tensors import model_tensors
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import (
    PEFT_NAMES,
    Adapter,
    DropoutKeys,
    lora_from_config,
)
from keras_posttrain.models.policy import Policy
from tests.support import (
    FAMILIES,
    REFERENCE,
    cases_in_ci,
    one_layer,
    random_rows,
)

MODELS = REFERENCE / "models"
PROJECTIONS = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj",
}  # fmt: skip
# Those whose layers differ, the others in `make test-full`.
by_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=() if name in ("gemma3", "qwen2") else pytest.mark.full,
        )
        for name in sorted(FAMILIES)
    ],
)
TOKEN_IDS = np.random.default_rng(0).integers(3, 500, (2, 12))
BATCH = {
    "token_ids": TOKEN_IDS.astype("int32"),
    "segment_ids": np.ones((2, 12), "int32"),
    "positions": np.tile(np.arange(12, dtype="int32"), (2, 1)),
    "sequence_ids": np.array([[3], [4]], "int32"),
}


def make(family, lora=None):
    """A model with an adapter; `qwen3` and others are names of `FAMILIES`."""
    causal_lm = loading.load_causal_lm(MODELS / FAMILIES[family])
    flatten_linear_layers(causal_lm.backbone)
    return causal_lm, Adapter(causal_lm, lora or kpt.LoRA(rank=3, alpha=6))


def fill(adapter, seed=0, scale=0.05):
    """Random B: at its start it is zero, and hides everything."""
    rng = np.random.default_rng(seed)
    for b in adapter.b:
        b.assign(rng.normal(0, scale, b.shape).astype("float32"))


def logits(causal_lm, adapter=None, batch=BATCH, key=None):
    # Not compiled: one pass is less work than its compilation.
    hidden = Policy(causal_lm, adapter).hidden_states(batch, key)
    return np.array(causal_lm.backbone.token_embedding(hidden, reverse=True))


def kernels(adapter):
    return [np.array(p.layer.kernel.value) for p in adapter.pairs]


def assert_close(got, want, atol):
    size = max(1.0, float(np.std(want)))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol * size)


# The function


def test_a_dense_layer_adds_its_low_rank_part():
    """y = x W + (alpha / rank) (x A) B, with x W alone where B is zero."""
    causal_lm, adapter = make("llama")
    rng = np.random.default_rng(0)
    at = [p.name for p in adapter.pairs].index("model.layers.0.mlp.up_proj")
    layer = adapter.pairs[at].layer
    assert isinstance(layer, keras.layers.Dense)
    x = rng.normal(size=(2, 5, 64)).astype("float32")
    plain = x @ np.array(layer.kernel.value)
    if layer.activation is not None:
        plain = np.array(layer.activation(plain))
    np.testing.assert_allclose(layer(x), plain, atol=1e-5)
    fill(adapter)
    a, b = (np.array(v[at].value) for v in (adapter.a, adapter.b))
    want = plain + 2.0 * (x @ a) @ b
    assert np.abs(want - plain).max() > 0.01
    np.testing.assert_allclose(layer(x), want, atol=1e-5)


@by_family
def test_the_adapter_equals_the_merged_weights(family):
    causal_lm, adapter = make(family)
    base = logits(causal_lm, adapter)
    fill(adapter)
    assert {p.name.rsplit(".", 1)[-1] for p in adapter.pairs} == PROJECTIONS
    adapted, before = logits(causal_lm, adapter), kernels(adapter)
    assert np.abs(adapted - base).max() > 1e-3
    with adapter.disabled():
        assert_close(logits(causal_lm, adapter), base, 1e-5)
    adapter.merge()
    assert adapter.is_merged
    for old, new in zip(before, kernels(adapter)):
        assert (old != new).any()
    assert_close(logits(causal_lm, adapter), adapted, 1e-5)
    adapter.unmerge()
    for old, new in zip(before, kernels(adapter)):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(logits(causal_lm, adapter), adapted)


@by_family
def test_every_kernel_layout_is_a_matrix(family):
    """Layer by layer: what it computes from a random input is what the
    merged kernel does, for three-axis kernels split in and out."""
    _, adapter = make(family)
    fill(adapter)
    rng = np.random.default_rng(1)
    for i, pair in enumerate(adapter.pairs[:7]):
        x = rng.normal(size=(2, 5, *pair.axes.in_shape)).astype("float32")
        adapted = np.array(pair.layer(x))
        with adapter.disabled():
            plain = np.array(pair.layer(x))
        a, b = np.array(adapter.a[i].value), np.array(adapter.b[i].value)
        low = 2.0 * x.reshape(2, 5, -1) @ a @ b
        np.testing.assert_allclose(
            adapted - plain, low.reshape(plain.shape), atol=2e-5
        )
        added = adapter.merged_kernel(i) - pair.layer.kernel.value
        matrix = np.moveaxis(
            np.array(added),
            [pair.axes.to_kernel.index(j) for j in range(added.ndim)],
            range(added.ndim),
        )
        np.testing.assert_allclose(
            matrix.reshape(pair.in_size, pair.out_size), 2.0 * a @ b, atol=1e-6
        )


def test_only_the_adapter_is_trainable():
    causal_lm, adapter = make("qwen3")
    assert not causal_lm.trainable_variables
    assert len(adapter.trainable_variables) == 2 * len(adapter.pairs)
    assert {v.dtype for v in adapter.trainable_variables} == {"float32"}


def test_the_adapter_is_merged_once_and_unmerged_once():
    _, adapter = make("qwen3")
    with pytest.raises(ValueError, match="not merged"):
        adapter.unmerge()
    adapter.merge()
    with pytest.raises(ValueError, match="merged already"):
        adapter.merge()
    assert adapter.is_merged
    adapter.unmerge()
    assert not adapter.is_merged


def test_merged_values_for_an_export_leave_the_model_alone():
    causal_lm, adapter = make("qwen3")
    fill(adapter)
    before = kernels(adapter)
    values = adapter.merged_values()
    got = [np.array(values(p.layer.kernel)) for p in adapter.pairs]
    for old, new in zip(before, kernels(adapter)):
        np.testing.assert_array_equal(old, new)
    embeddings = causal_lm.backbone.token_embedding.embeddings
    np.testing.assert_array_equal(values(embeddings), embeddings.value)
    adapter.merge()
    for a, b in zip(got, kernels(adapter)):
        np.testing.assert_array_equal(a, b)
    again = adapter.merged_values()
    for a, p in zip(got, adapter.pairs):
        np.testing.assert_array_equal(a, again(p.layer.kernel))


# Settings


def test_scale():
    """alpha / rank, and alpha / sqrt(rank): 6 / 4 and 6 / 2."""
    assert kpt.LoRA(rank=4, alpha=6).scale == 1.5
    assert kpt.LoRA(rank=4, alpha=6, rslora=True).scale == 3.0
    assert kpt.LoRA(rank=4).alpha == 8
    assert kpt.LoRA(rank=4).scale == 2.0


def test_the_adapter_scales_by_rslora():
    lora = dict(rank=4, alpha=6, targets="q_proj")
    outputs = []
    for rslora in (False, True):
        causal_lm, adapter = make("qwen3", kpt.LoRA(**lora, rslora=rslora))
        fill(adapter)
        x = np.ones((1, 2, 64), "float32")
        layer = adapter.pairs[0].layer
        adapted = np.array(layer(x))
        with adapter.disabled():
            outputs.append(adapted - np.array(layer(x)))
    np.testing.assert_allclose(outputs[1], 2 * outputs[0], atol=1e-5)


@pytest.mark.parametrize(
    "targets, count",
    [
        ("all-linear", 14),
        ("q_proj", 2),
        ("q_proj|v_proj", 4),
        (["q_proj", r"layers\.0\.mlp\.(up|down)_proj"], 4),
        (("mlp.*",), 6),
        ("proj", 14),
        (r"layers\.1\..*", 7),
    ],
)
def test_targets(targets, count):
    _, adapter = make("qwen3", kpt.LoRA(rank=2, targets=targets))
    assert len(adapter.pairs) == count


@pytest.mark.parametrize("targets", ["lm_head", ("q_proj", "lm_head")])
def test_targets_that_match_nothing_are_refused(targets):
    wanted = "No linear layer matches 'lm_head' of `targets`"
    with pytest.raises(ValueError, match=wanted) as e:
        make("qwen3", kpt.LoRA(targets=targets))
    assert "model.layers.0.self_attn.q_proj" in str(e.value)
    assert f"Received: targets={targets!r}" in str(e.value)


def test_a_rank_above_that_of_the_layers_is_refused():
    with pytest.raises(ValueError, match="`rank` must be at most .*=100000"):
        make("qwen3", kpt.LoRA(rank=100_000))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rank": 0}, "`rank` must be a positive int"),
        ({"rank": 2.0}, "Received: rank=2.0"),
        ({"rank": True}, "Received: rank=True"),
        ({"alpha": "8"}, "Received: alpha='8'"),
        ({"alpha": float("nan")}, "Received: alpha=nan"),
        ({"dropout": 1.0}, "Received: dropout=1.0"),
        ({"dropout": -0.1}, "`dropout` must be a probability"),
        ({"dropout": "0.1"}, "Received: dropout='0.1'"),
        ({"targets": "("}, "`targets` must be 'all-linear'"),
        ({"targets": [3]}, r"Received: targets=\(3,\)"),
        ({"targets": []}, r"Received: targets=\(\)"),
        ({"targets": None}, "Received: targets=None"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kpt.LoRA(**arguments)


def test_pefts_names_are_answered_with_ours():
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert known >= set(PEFT_NAMES)
    ours = {field.name for field in dataclasses.fields(kpt.LoRA)}
    for name, own in PEFT_NAMES.items():
        assert own in ours
        with pytest.raises(TypeError, match=f"`{name}`.*use `{own}`"):
            kpt.LoRA(**{name: 8})
    assert copy.deepcopy(kpt.LoRA(rank=2)) == kpt.LoRA(2)


def test_the_start_is_uniform_and_repeatable():
    """A within 1 / sqrt(in), spread over it; B zero; by seed and name."""
    _, one = make("qwen3", kpt.LoRA(rank=16))
    _, same = make("qwen3", kpt.LoRA(rank=16))
    _, other = make("qwen3", kpt.LoRA(rank=16, seed=1))
    _, fewer = make("qwen3", kpt.LoRA(rank=16, targets="v_proj"))
    for pair, a, b in zip(one.pairs, one.a, one.b):
        bound = pair.in_size**-0.5
        a = np.array(a.value)
        assert a.shape == (pair.in_size, 16)
        assert 0.95 * bound < np.abs(a).max() <= bound
        np.testing.assert_allclose(a.std(), bound / 3**0.5, rtol=0.1)
        assert not np.array(b.value).any()
        assert b.shape == (16, pair.out_size)
    firsts = [np.array(a.value).ravel()[:8].tobytes() for a in one.a]
    assert len(set(firsts)) == len(firsts), "no two layers start alike"
    by_name = {p.name: a for p, a in zip(one.pairs, one.a)}
    for a, b, c in zip(one.a, same.a, other.a):
        np.testing.assert_array_equal(a.value, b.value)
        assert (np.array(a.value) != np.array(c.value)).any()
    for pair, a in zip(fewer.pairs, fewer.a):
        np.testing.assert_array_equal(a.value, by_name[pair.name].value)


def test_kerass_own_lora_is_refused():
    causal_lm = loading.load_causal_lm(MODELS / "qwen3")
    causal_lm.backbone.enable_lora(2)
    with pytest.raises(ValueError, match="Keras's own LoRA is enabled"):
        Adapter(causal_lm, kpt.LoRA(rank=2))


@pytest.mark.parametrize(
    "mode, again",
    cases_in_ci(
        ("int8", False),
        ("int4", True),
        of=[(x, y) for x in ("int8", "int4") for y in (False, True)],
    ),
)
def test_adapted_layers_that_keras_quantizes_are_refused(
    mode, again, monkeypatch
):
    """Keras calls `quantized_call` of such a layer, without the adapter."""
    # Keras collects garbage for each weight that it replaces.
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    lora = kpt.LoRA(rank=2)
    task = kpt.SFTTask.from_preset(
        one_layer(MODELS / "qwen3"), lora=lora, sequence_length=16
    )
    task.causal_lm.backbone.quantize(
        mode, filters=lambda layer: layer.name == "query"
    )
    with pytest.raises(ValueError, match=f"q_proj' with quant.*'{mode}'"):
        if again:
            kpt.SFTTask(task.causal_lm, task.tokenizer, lora=lora)
        task.compile()
        task.fit([{"text": "one two"}], verbose=0)


# Dropout


def masks(seed=0, step=0, sequences=(0, 1, 0), positions=(0, 0, 1), layer=0):
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys = DropoutKeys(key, jnp.array(sequences), jnp.array(positions))
    return np.array(keys.mask(layer, 64, 0.5))


def test_masks_are_keyed_by_what_a_token_is():
    base = masks()
    np.testing.assert_array_equal(base, masks())
    # The same tokens in another order, in another row.
    moved = masks(sequences=(0, 0, 1), positions=(1, 0, 0))
    np.testing.assert_array_equal(moved, base[[2, 0, 1]])
    for other in (masks(seed=1), masks(step=1), masks(layer=1)):
        assert all((a != b).any() for a, b in zip(base, other))
    assert all((base[i] != base[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


def test_masks_keep_the_share_they_should():
    key = jax.random.key(0)
    keys = DropoutKeys(key, jnp.zeros(400, "int32"), jnp.arange(400))
    kept = np.array(keys.mask(0, 64, 0.3))
    np.testing.assert_allclose(kept.mean(), 0.7, atol=0.02)


def test_dropout_drops_inputs_of_the_adapter_only():
    """With `keep` the mask, (x keep / (1 - rate)) A B is added to x W."""
    causal_lm, adapter = make("qwen3", kpt.LoRA(rank=2, dropout=0.4))
    fill(adapter)
    pair = adapter.pairs[0]
    x = np.random.default_rng(2).normal(size=(3, 1, 64)).astype("float32")
    keys = DropoutKeys(jax.random.key(1), jnp.arange(3), jnp.zeros(3, int))
    with adapter.dropout(keys):
        got = np.array(pair.layer(x))
    with adapter.disabled(), adapter.dropout(keys):
        plain = np.array(pair.layer(x))
    keep = np.array(keys.mask(0, 64, 0.4))[:, None]
    dropped = np.where(keep, x / 0.6, 0)
    a, b = np.array(adapter.a[0].value), np.array(adapter.b[0].value)
    low = (2.0 * dropped @ a @ b).reshape(plain.shape)
    np.testing.assert_allclose(got, plain + low, atol=1e-5)


def test_dropout_follows_sequences_through_the_model():
    """A sequence has its masks by its number, whatever its row; other steps
    have others; without a key nothing is dropped."""
    causal_lm, adapter = make("qwen3", kpt.LoRA(rank=4, dropout=0.5))
    fill(adapter)
    keys = [jax.random.key(i) for i in range(2)]
    base = logits(causal_lm, adapter, key=keys[0])
    swapped = {k: v[::-1] for k, v in BATCH.items()}
    moved = logits(causal_lm, adapter, swapped, keys[0])
    np.testing.assert_allclose(moved[::-1], base, atol=1e-5)
    packed = {
        "token_ids": BATCH["token_ids"].reshape(1, -1),
        "segment_ids": np.repeat([[1, 2]], 12, axis=1).astype("int32"),
        "positions": BATCH["positions"].reshape(1, -1),
        "sequence_ids": np.array([[3, 4]], "int32"),
    }
    one_row = logits(causal_lm, adapter, packed, keys[0])
    np.testing.assert_allclose(one_row.reshape(base.shape), base, atol=1e-5)
    other = logits(causal_lm, adapter, key=keys[1])
    none = logits(causal_lm, adapter)
    for x in (other, none):
        assert np.abs(x - base).max() > 1e-3


# PEFT's files


def peft_logits(family, directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / FAMILIES[family],
        attn_implementation="eager",
        dtype=torch.float32,
    )
    model = peft.PeftModel.from_pretrained(model, directory).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKEN_IDS)).logits.numpy()


@by_family
@pytest.mark.parametrize("rslora", [False, True])
def test_what_we_save_peft_loads(family, rslora, tmp_path):
    causal_lm, adapter = make(
        family, kpt.LoRA(rank=3, alpha=5, rslora=rslora, dropout=0.1)
    )
    fill(adapter)
    adapter.save(tmp_path, base_name="base")
    got = logits(causal_lm, adapter)
    with adapter.disabled():
        assert np.abs(got - logits(causal_lm, adapter)).max() > 1e-3
    assert_close(got, peft_logits(family, tmp_path), 2e-5)


def peft_adapter(family, directory, **settings):
    """An adapter that PEFT made and wrote, B not zero."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / FAMILIES[family], dtype=torch.float32
    )
    torch.manual_seed(0)
    settings = {"target_modules": "all-linear", **settings}
    config = peft.LoraConfig(
        r=3, lora_alpha=7, task_type="CAUSAL_LM", **settings
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.05)
    model.save_pretrained(directory)
    return directory


@by_family
def test_what_peft_saves_we_load(family, tmp_path):
    path = peft_adapter(family, tmp_path)
    causal_lm, adapter = make(family, kpt.LoRA(rank=3, alpha=7))
    adapter.load(path)
    assert_close(logits(causal_lm, adapter), peft_logits(family, path), 2e-5)
    adapter.save(tmp_path / "again")
    left, right = (
        load_file(p / WEIGHTS_FILE) for p in (path, tmp_path / "again")
    )
    assert set(left) == set(right)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*layers\.0\.(self_attn|mlp)\.(q|up)_proj"},
        {"target_modules": ["layers.1.mlp.down_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"exclude_modules": ["k_proj"]},
    ],
    ids=["names", "regex", "path", "layers", "excluded"],
)
def test_a_task_without_an_adapter_takes_pefts(settings, tmp_path):
    path = peft_adapter("qwen3", tmp_path, **settings)
    task = kpt.SFTTask.from_preset(MODELS / "qwen3", sequence_length=16)
    task.load_adapter(path)
    assert (task.adapter.lora.rank, task.adapter.lora.alpha) == (3, 7)
    got = logits(task.causal_lm, task.adapter)
    assert_close(got, peft_logits("qwen3", path), 2e-5)
    assert len(task.trainable_variables) == 2 * len(task.adapter.pairs)
    task.save_adapter(tmp_path / "again")
    again = peft_logits("qwen3", tmp_path / "again")
    assert_close(again, peft_logits("qwen3", path), 2e-5)


def test_an_adapter_is_loaded_before_compile(tmp_path):
    path = peft_adapter("qwen3", tmp_path)
    task = kpt.SFTTask.from_preset(MODELS / "qwen3", sequence_length=16)
    task.compile()
    with pytest.raises(ValueError, match="Load the adapter before `compile`"):
        task.load_adapter(path)
    with pytest.raises(ValueError, match="`save_adapter` needs an adapter"):
        task.save_adapter(tmp_path / "no")


def test_target_modules_say_which_layers(tmp_path):
    """Last parts of the names if these are enough, else full names."""
    for targets, want in (
        ("all-linear", sorted(PROJECTIONS)),
        ("q_proj", ["q_proj"]),
        (r"layers\.1\.self_attn\.q_proj", ["model.layers.1.self_attn.q_proj"]),
    ):
        _, adapter = make("qwen3", kpt.LoRA(rank=2, targets=targets))
        adapter.save(tmp_path)
        config = json.loads((tmp_path / CONFIG_FILE).read_text())
        assert config["target_modules"] == want
        given = lora_from_config(config, tmp_path)
        _, again = make("qwen3", given)
        assert [p.name for p in again.pairs] == [p.name for p in adapter.pairs]


def broken(directory, drop=None, rename=None, config=None):
    """The reference's qwen3 adapter (rank 4, alpha 8), changed."""
    path = directory / "adapter"
    shutil.copytree(REFERENCE / "adapters/qwen3_lora_r4_init", path)
    settings = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps({**settings, **(config or {})}))
    tensors = load_file(path / WEIGHTS_FILE)
    if drop:
        tensors = {k: v for k, v in tensors.items() if drop not in k}
    if rename:
        tensors = {k.replace(*rename): v for k, v in tensors.items()}
    save_file(tensors, path / WEIGHTS_FILE)
    return path


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"config": {"r": 8}},
            ["'rank': 8", "'rank': 4", "kpt.LoRA(rank=8, alpha=8"],
        ),
        ({"config": {"lora_alpha": 16}}, ["'alpha': 16", "'alpha': 8"]),
        ({"config": {"use_rslora": True}}, ["'rslora': True"]),
        (
            {"drop": "layers.1.mlp.up_proj"},
            ["has no weights for 'model.layers.1.mlp.up_proj'", "targets="],
        ),
        (
            {"rename": ("layers.1.mlp.up_proj", "layers.7.mlp.up_proj")},
            ["has no weights for"],
        ),
        ({"config": {"use_dora": True}}, ["use_dora=True", "not plain LoRA"]),
        (
            {"config": {"modules_to_save": ["lm_head"]}},
            ["modules_to_save=['lm_head']"],
        ),
        ({"config": {"bias": "all"}}, ["bias='all'", "only bias='none'"]),
        ({"config": {"lora_bias": True}}, ["lora_bias=True"]),
        ({"config": {"rank_pattern": {"q_proj": 2}}}, ["rank_pattern="]),
        ({"config": {"alpha_pattern": {"q_proj": 2}}}, ["alpha_pattern="]),
        ({"config": {"peft_type": "IA3"}}, ["Only LoRA", "'IA3'"]),
        ({"config": {"kasa_config": {"a": 1}}}, ["kasa_config={'a': 1}"]),
        (
            {"config": {"init_lora_weights": "pissa"}},
            ["init_lora_weights='pissa'", "changes the base weights"],
        ),
        ({"config": {"r": None}}, ["`rank` must be a positive int"]),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_is_refused(change, words, tmp_path):
    path = broken(tmp_path, **change)
    _, adapter = make("qwen3", kpt.LoRA(rank=4, alpha=8))
    before = [np.array(v.value) for v in adapter.variables]
    with pytest.raises(ValueError) as e:
        adapter.load(path)
    for word in words:
        assert word in str(e.value)
    for old, v in zip(before, adapter.variables):
        np.testing.assert_array_equal(old, v.value)


def test_layers_that_the_task_leaves_out_are_refused(tmp_path):
    path = broken(tmp_path)
    lora = kpt.LoRA(rank=4, alpha=8, targets="q_proj|v_proj")
    _, adapter = make("qwen3", lora)
    with pytest.raises(ValueError, match="also adapts") as e:
        adapter.load(path)
    assert "'up_proj'" in str(e.value) and "'q_proj'" not in str(e.value)
    assert "Received: targets='q_proj|v_proj'" in str(e.value)
    assert not any(np.array(b.value).any() for b in adapter.b)


def test_layers_that_nobody_adapts_here_are_named(tmp_path):
    path = broken(tmp_path, rename=("layers.1.mlp.up_proj", "lm_head"))
    lora = kpt.LoRA(rank=4, alpha=8, targets=r"layers\.0\..*")
    _, adapter = make("qwen3", lora)
    tensors = load_file(path / WEIGHTS_FILE)
    kept = {k: v for k, v in tensors.items() if "layers.1" not in k}
    save_file(kept, path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="not all linear layers of") as e:
        adapter.load(path)
    assert "'lm_head'" in str(e.value)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    path = broken(tmp_path)
    tensors = load_file(path / WEIGHTS_FILE)
    wider = {
        k: np.repeat(v, 2, axis=1) if "lora_A" in k else v
        for k, v in tensors.items()
    }
    save_file(wider, path / WEIGHTS_FILE)
    _, adapter = make("qwen3", kpt.LoRA(rank=4, alpha=8))
    with pytest.raises(ValueError, match="belongs to another model") as e:
        adapter.load(path)
    assert "has shape (4, 128), this model needs (4, 64)" in str(e.value)
    assert not any(np.array(b.value).any() for b in adapter.b)


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(missing, tmp_path):
    path = broken(tmp_path)
    (path / missing).unlink()
    _, adapter = make("qwen3", kpt.LoRA(rank=4, alpha=8))
    with pytest.raises(ValueError, match=f"{missing} is missing") as e:
        adapter.load(path)
    assert f"Received: {str(path)!r}" in str(e.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_adapters_load(dtype, tmp_path):
    path = broken(tmp_path)
    tensors = safetensors.torch.load_file(path / WEIGHTS_FILE)
    tensors = {k: v.to(dtype) for k, v in tensors.items()}
    safetensors.torch.save_file(tensors, path / WEIGHTS_FILE)
    _, adapter = make("qwen3", kpt.LoRA(rank=4, alpha=8))
    adapter.load(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    got = np.array(adapter.a[0].value)
    np.testing.assert_array_equal(got, tensors[name].float().numpy().T)


def test_names_are_hugging_faces():
    causal_lm, adapter = make("gemma3")
    names = {t.name for t in model_tensors(causal_lm)}
    for pair in adapter.pairs:
        assert f"{pair.name}.weight" in names


def test_programs_made_before_a_merge_do_not_add_the_adapter_twice():
    task = kpt.SFTTask.from_preset(
        one_layer(MODELS / "llama3"), sequence_length=64, lora=kpt.LoRA(rank=4)
    )
    for b in task.adapter.b:
        b.assign(np.random.default_rng(0).normal(0, 0.05, b.shape))
    task.compile()
    rows = random_rows(4)
    loss, before = task.evaluate(rows)["loss"], task.log_probs(rows)
    task.merge_adapter()
    for left, right in zip(before, task.log_probs(rows)):
        np.testing.assert_allclose(left, right, atol=2e-5)
    np.testing.assert_allclose(task.evaluate(rows)["loss"], loss, rtol=1e-5)
    task.unmerge_adapter()
    for left, right in zip(before, task.log_probs(rows)):
        np.testing.assert_array_equal(left, right)
