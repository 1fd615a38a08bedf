"""Adapters of experts: their function, their merge, and PEFT's."""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
import peft
import pytest
import torch
import transformers

import keras_posttrain as kpt
from keras_posttrain.models.experts import (
    Expert,
    compute_chosen_experts,
    expert_kernels,
)
from keras_posttrain.models.hf import loading
from keras_posttrain.models.hf.adapter_files import CONFIG_FILE
from keras_posttrain.models.hf.families import FAMILIES
from keras_posttrain.models.lora import Adapter
from keras_posttrain.models.policy import Policy
from tests.models.mixtures import MIXTURES, make_mixture
from tests.models.test_experts import TOP_K, assert_close, example
from tests.models.tiny_checkpoints import (
    TOKEN_IDS,
    make_checkpoint,
    packed_logits,
)
from tests.support import (
    cases_in_ci,
    in_ci,
    random_rows,
    spread_adapter,
    weights,
)

by_family = pytest.mark.parametrize("family", MIXTURES)
one_in_ci = pytest.mark.parametrize("family", in_ci("Qwen3Moe", of=MIXTURES))
# Adapters need Hugging Face's names of a family's layers.
named = pytest.mark.skipif(
    "mixtral" not in FAMILIES, reason="The table has no mixtures."
)


@pytest.mark.parametrize(
    "fused, block",
    cases_in_ci(
        (True, 4),
        (False, 1),
        of=[(x, y) for x in (True, False) for y in (1, 4)],
    ),
)
def test_the_low_rank_part_is_that_of_merged_kernels(block, fused):
    """Values, and the gradients of both factors."""
    x, router, kernels = example(fused=fused)
    keys = jax.random.split(jax.random.key(2), 4)
    experts, width, hidden = kernels["contract"].shape
    factors = {
        "expand": (
            jax.random.normal(keys[0], (experts, hidden, 3)) / 4,
            jax.random.normal(keys[1], (experts, 3, 2 * width)) / 2,
        ),
        "contract": (
            jax.random.normal(keys[2], (experts, width, 3)) / 4,
            jax.random.normal(keys[3], (experts, 3, hidden)) / 2,
        ),
    }
    expert = Expert(TOP_K, True, jax.nn.silu)

    def added(factors):
        lora = {name: [pair] for name, pair in factors.items()}
        return expert(x, x @ router, {**kernels, "lora": lora}, block=block)

    def merged(factors):
        more = {name: a @ b for name, (a, b) in factors.items()}
        parts = [more["expand"]]
        if not fused:
            parts = jnp.split(more["expand"], 2, axis=-1)
        whole = {
            "expand": [k + m for k, m in zip(kernels["expand"], parts)],
            "contract": kernels["contract"] + more["contract"],
        }
        return expert(x, x @ router, whole, block=block)

    def run(function):
        return jax.value_and_grad(
            lambda f: (jnp.sum(jnp.sin(function(f))), function(f)),
            has_aux=True,
        )(factors)

    (_, got), got_gradients = run(added)
    (_, want), want_gradients = run(merged)
    assert_close(got, want, 2e-6)
    assert_close(got_gradients, want_gradients, 5e-6)


def adapted(family, targets=("q_proj", "experts"), **settings):
    """A mixture with experts in all layers, and an adapter that is not 0."""
    changes = {"mlp_only_layers": []} if family == "Qwen3Moe" else {}
    causal_lm = make_mixture(family, **changes)
    adapter = Adapter(causal_lm, kpt.LoRA(3, targets=targets, **settings))
    rng = np.random.default_rng(0)
    for b in adapter.b:
        b.assign(rng.normal(0, 0.1, b.shape).astype("float32"))
    return causal_lm, adapter


@named
@one_in_ci
def test_the_adapter_equals_the_merged_experts(family):
    causal_lm, adapter = adapted(family)
    for layer in causal_lm.backbone.transformer_layers:
        compute_chosen_experts(layer)
    got = packed_logits(causal_lm)
    with adapter.disabled():
        base = packed_logits(causal_lm)
    assert np.abs(got - base).max() > 0.05
    before = [np.array(v) for v in causal_lm.variables]
    values = adapter.merged_values()
    export = [np.array(values(v)) for v in causal_lm.variables]
    adapter.merge()
    np.testing.assert_allclose(packed_logits(causal_lm), got, atol=2e-5)
    moved = set()
    for v, old, merged in zip(causal_lm.variables, before, export):
        np.testing.assert_array_equal(v, merged)
        if (np.array(v) != old).any():
            moved.add(v.path.split("/")[-1])
    kinds = ["gate", "output"]
    kinds += ["intermediate"] if family == "Mixtral" else []
    assert moved == {
        "kernel",
        *(f"expert_feedforward_{kind}_dense" for kind in kinds),
    }
    adapter.unmerge()
    for v, old in zip(causal_lm.variables, before):
        np.testing.assert_array_equal(v, old)
    np.testing.assert_array_equal(packed_logits(causal_lm), got)
    adapter.detach(causal_lm)
    np.testing.assert_array_equal(packed_logits(causal_lm), base)


@named
@by_family
def test_experts_are_adapted_only_where_they_are_named(family):
    def names(targets):
        _, adapter = adapted(family, targets)
        return {p.name.split(".", 3)[-1] for p in adapter.pairs}

    both = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert not names("all-linear") & both
    assert not names(["o_proj", "q_proj|down_proj"]) & both
    assert names(["experts"]) == both
    assert names([r"experts\.down_proj"]) == {"mlp.experts.down_proj"}
    assert names(["experts", "q_proj"]) == {*both, "self_attn.q_proj"}


@named
def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match="no dropout.*dropout=0.1"):
        adapted("Mixtral", dropout=0.1)
    with pytest.raises(ValueError, match="No linear layer matches 'other'"):
        adapted("Mixtral", ["experts", "other"])


@named
@one_in_ci
def test_a_step_is_the_same_in_every_way(family):
    rows = random_rows(8, seed=1, vocabulary=90)
    changes = {"mlp_only_layers": []} if family == "Qwen3Moe" else {}
    found = []
    for way in (
        {},
        {"packing": True, "batch_size": 4, "micro_batch_size": 2},
    ):
        task = kpt.SFTTask(
            make_mixture(family, **changes),
            lora=kpt.LoRA(rank=2, targets=["v_proj", "experts"]),
            sequence_length=64,
            remat="full" if way else "none",
        )
        spread_adapter(task)
        frozen = [np.array(v) for v in task.causal_lm.variables]
        before = weights(task)
        task.compile(
            keras.optimizers.SGD(0.1),
            micro_batch_size=way.pop("micro_batch_size", None),
            max_grad_norm=None,
        )
        fit = {"batch_size": 8, "shuffle": False, "verbose": 0, **way}
        task.fit(rows, **fit)
        after = weights(task)
        found.append({k: after[k] - before[k] for k in after})
        for v, value in zip(task.causal_lm.variables, frozen):
            np.testing.assert_array_equal(v, value)
    plain, other = found
    atol = 2e-7 + 2e-5 * max(np.abs(x).max() for x in plain.values())
    for key, value in plain.items():
        assert np.abs(value).max() > 0, key
        np.testing.assert_allclose(other[key], value, atol=atol, err_msg=key)


@named
@pytest.mark.parametrize("merge", [True, False])
def test_the_engine_samples_with_adapted_experts(merge):
    task = kpt.SFTTask(
        make_mixture("Mixtral"),
        lora=kpt.LoRA(rank=2, targets=["experts"]),
        sequence_length=32,
    )
    spread_adapter(task)
    engine = kpt.rollout.NativeRollout(num_slots=2, merge_adapter=merge)
    engine.set_model(task)
    prompt = [int(x) for x in TOKEN_IDS[0, :5]]
    request = kpt.rollout.Request(prompt, max_tokens=8, seed=0)
    [[sample]] = engine.generate([request])
    row = {
        "token_ids": prompt + list(sample.token_ids),
        "completion_mask": [0] * 5 + [1] * len(sample.token_ids),
    }
    want = task.log_probs([row])[0][5:]
    np.testing.assert_allclose(sample.per_token_logps, want, atol=1e-5)


FIELDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 12,
    },
}


@named
@pytest.mark.parametrize(
    "model_type, targets",
    [
        # `test_families.py` has it in CI, in both directions.
        pytest.param("mixtral", ["q_proj", "experts"], marks=pytest.mark.full),
        ("qwen2_moe", "all-linear"),
        ("qwen2_moe", [r"experts\.gate_up_proj", "k_proj"]),
        ("qwen3_moe", ["experts"]),
    ],
)
def test_peft_computes_the_same(model_type, targets, tmp_path):
    """With its wrappers of parameters, in transformers' stacked experts."""
    path = tmp_path / "model"
    make_checkpoint(path, model_type, as_saved=True, **FIELDS[model_type])
    causal_lm = loading.load_causal_lm(path)
    adapter = Adapter(causal_lm, kpt.LoRA(rank=2, targets=targets))
    rng = np.random.default_rng(0)
    for b in adapter.b:
        b.assign(rng.normal(0, 0.2, b.shape).astype("float32"))
    rows, length = TOKEN_IDS.shape
    batch = {
        "token_ids": TOKEN_IDS,
        "segment_ids": np.ones_like(TOKEN_IDS),
        "positions": np.tile(np.arange(length), (rows, 1)),
    }
    hidden = Policy(causal_lm, adapter).hidden_states(batch)
    got = causal_lm.backbone.token_embedding(hidden, reverse=True)
    adapter.save(tmp_path / "adapter", base_name=str(path))
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert bool(config["target_parameters"]) == (targets != "all-linear")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        want = model(torch.tensor(TOKEN_IDS)).logits.numpy()
    np.testing.assert_allclose(got, want, atol=1e-5 * np.std(want) * 2)


def test_kernels_have_one_object_and_hugging_faces_names():
    causal_lm = make_mixture("Qwen3Moe", num_layers=3)
    found = expert_kernels(causal_lm)
    assert list(found) == [
        f"model.layers.{i}.mlp.experts.{name}_proj"
        for i in (0, 2)
        for name in ("gate_up", "down")
    ]
    again = expert_kernels(causal_lm)
    assert all(found[name] is again[name] for name in found)
