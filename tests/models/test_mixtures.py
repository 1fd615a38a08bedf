"""Mixtures of experts: KerasHub's numbers, however they are run."""

import functools

import jax
import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import attention, experts
from keras_posttrain.models.policy import Policy
from tests.models.mixtures import MIXTURES, make_mixture
from tests.models.tiny_checkpoints import (
    TOKEN_IDS,
    assert_equal_logits,
    cached_logits,
    packed_logits,
    plain_logits,
)
from tests.support import random_rows, rows_of_samples, weights

by_family = pytest.mark.parametrize("family", MIXTURES)
ROWS = random_rows(8, seed=1, vocabulary=90)


@by_family
def test_every_way_of_running_gives_kerashubs_logits(family):
    causal_lm = make_mixture(family)
    # Before the layers are changed.
    want = plain_logits(causal_lm)
    assert Policy(causal_lm).packable
    for way in (plain_logits, packed_logits, cached_logits):
        assert_equal_logits(way(causal_lm), want)


@pytest.mark.parametrize(
    "family, window",
    [
        ("Mixtral", {"sliding_window": 3}),
        (
            "QwenMoe",
            {"use_sliding_window_attention": True, "sliding_window_size": 3},
        ),
        ("Qwen3Moe", {"sliding_window_size": 3}),
    ],
)
def test_a_window_is_that_of_the_layer(family, window):
    """A token that two layers of windows of 3 cannot reach has no effect."""
    causal_lm = make_mixture(family, num_layers=2, **window)
    policy = Policy(causal_lm)
    for layer in policy.layers:
        assert attention.hooked_window(layer._self_attention_layer) == 3
    found = []
    for first in (5, 6):
        ids = TOKEN_IDS[:1].copy()
        ids[0, 0] = first
        batch = {
            "token_ids": ids,
            "segment_ids": np.ones_like(ids),
            "positions": np.arange(ids.size)[None],
        }
        found.append(np.array(policy.hidden_states(batch)[0]))
    moved = np.abs(found[0] - found[1]).max(axis=-1)
    assert (moved[:5] > 1e-4).all() and (moved[5:] == 0).all()


def one_step(family, lora=None, micro_batch_size=None, **kwargs):
    """One step of SGD; returns the loss, its norm and the update."""
    fit = {k: kwargs.pop(k) for k in ("batch_size", "packing") if k in kwargs}
    task = kpt.SFTTask(
        make_mixture(family), sequence_length=64, lora=lora, **kwargs
    )
    before = weights(task)
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
    )
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0, **fit}
    history = task.fit(ROWS, **fit).history
    assert task.step == 1
    after = weights(task)
    return history, {k: after[k] - before[k] for k in after}


@functools.cache
def plain_step(family):
    return one_step(family)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            {"packing": True, "batch_size": 4, "chunk_size": 7},
            marks=pytest.mark.full,
        ),
        {
            "packing": True,
            "batch_size": 4,
            "micro_batch_size": 2,
            "remat": "full",
        },
        pytest.param(
            {"micro_batch_size": 4, "remat": "full"}, marks=pytest.mark.full
        ),
    ],
    ids=["packed", "packed-micro-batches-remat", "micro-batches-remat"],
)
@by_family
def test_a_step_is_the_same_in_every_way(family, way):
    (history, update), (other, other_update) = (
        plain_step(family),
        one_step(family, **way),
    )
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(history[name], other[name], rtol=1e-5)
    atol = 2e-7 + 2e-5 * max(np.abs(x).max() for x in update.values())
    for key, value in update.items():
        np.testing.assert_allclose(
            other_update[key], value, rtol=0, atol=atol, err_msg=key
        )
    # All experts were chosen, and the router is trained.
    for key, value in update.items():
        if "expert" in key or "sparse_feedforward_gate" in key:
            axes = tuple(range(1, value.ndim))
            assert (np.abs(value).max(axis=axes) > 0).all(), key


@by_family
def test_the_engine_has_the_trainers_log_probs(family):
    task = kpt.SFTTask(make_mixture(family), sequence_length=40)
    engine = kpt.rollout.NativeRollout(num_slots=3)
    engine.set_model(task)
    requests = [
        kpt.rollout.Request(list(ids[:n]), max_tokens=12, seed=i)
        for i, (ids, n) in enumerate(zip(TOKEN_IDS.repeat(3, 0), range(3, 9)))
    ]
    samples = [sample for (sample,) in engine.generate(requests)]
    rows = rows_of_samples([x.token_ids for x in requests], samples)
    for request, sample, want in zip(requests, samples, task.log_probs(rows)):
        want = want[len(request.token_ids) :]
        np.testing.assert_allclose(sample.per_token_logps, want, atol=1e-5)


def test_shared_prefixes_have_the_log_probs_of_copies():
    causal_lm = make_mixture("Qwen3Moe")
    rng = np.random.default_rng(0)
    pairs = [
        {
            "prompt_ids": rng.integers(3, 90, 9).tolist(),
            "chosen_ids": rng.integers(3, 90, 5).tolist(),
            "rejected_ids": rng.integers(3, 90, 7).tolist(),
        }
        for _ in range(4)
    ]
    found = []
    start = [np.array(v) for v in causal_lm.variables]
    for share in (False, True):
        for v, value in zip(causal_lm.variables, start):
            v.assign(value)
        causal_lm.trainable = True
        task = kpt.DPOTask(causal_lm, sequence_length=32)
        task.compile(optimizer=keras.optimizers.SGD(0.1))
        task.fit(pairs, batch_size=4, share_prefix=share, verbose=0)
        found.append(weights(task))
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, atol=2e-6)


def test_subclasses_keep_kerashubs_call():
    class Changed(keras_hub.models.MixtralBackbone):
        pass

    causal_lm = make_mixture("Mixtral")
    plain = causal_lm.backbone.get_config()
    names = ("vocabulary_size", "num_layers", "hidden_dim", "num_experts")
    names += ("num_query_heads", "num_key_value_heads", "intermediate_dim")
    backbone = Changed(**{k: plain[k] for k in names})
    changed = keras_hub.models.MixtralCausalLM(backbone, preprocessor=None)
    assert not Policy(changed).packable
    block = backbone.transformer_layers[0]._sparse_moe_block
    assert not hasattr(block, "kpt_chosen")


@by_family
def test_keras_fit_still_has_the_loss_of_the_router(family):
    causal_lm = make_mixture(family)
    layer = causal_lm.backbone.transformer_layers[0]
    experts.compute_chosen_experts(layer)
    name = "mlp" if hasattr(layer, "mlp") else "_sparse_moe_block"
    block = getattr(layer, name)
    x = jax.random.normal(jax.random.key(0), (2, 4, 32))
    quiet, _ = block(x, training=False)
    assert not block.losses
    loud, _ = block(x, training=True)
    assert len(block.losses) == 1
    np.testing.assert_allclose(quiet, loud, atol=1e-5)
