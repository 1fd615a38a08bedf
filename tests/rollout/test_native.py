"""The built-in engine: the contract, the reference, and what it may take."""

import functools

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.native import decoding
from tests.rollout import contract
from tests.support import (
    FAMILIES,
    REFERENCE,
    in_ci,
    load_json,
    one_layer,
    random_rows,
)

CASES = {c["name"]: c for c in load_json("generation.json")["cases"]}


def make(model="llama3", **kwargs):
    return kpt.SFTTask.from_preset(
        REFERENCE / "models" / model, sequence_length=64, **kwargs
    )


@functools.cache
def shared(model="llama3"):
    return make(model)


def engine_of(task, *args, **kwargs):
    engine = NativeRollout(*args, **kwargs)
    engine.set_model(task)
    return engine


one_engine = functools.cache(engine_of)


def with_slots(task, num_slots=128):
    """Returns one engine for all numbers of slots of a task.

    Its programs are compiled once. They are those of an engine of its own:
    they follow from the samples and this number.
    """
    engine = one_engine(task)
    engine.num_slots = num_slots
    return engine


def ids(out):
    return [[c.token_ids for c in samples] for samples in out]


# `test_drafts.py` has the adapter.
@pytest.mark.parametrize(
    "kwargs",
    [{}, pytest.param({"lora": kpt.LoRA(rank=4)}, marks=pytest.mark.full)],
)
def test_the_contract(kwargs):
    task = make(**kwargs)
    contract.check_engine(engine_of(task, 4), task)


@pytest.mark.parametrize(
    "lora",
    [None, pytest.param(kpt.LoRA(rank=4), marks=pytest.mark.full)],
    ids=["full", "lora"],
)
def test_samples_continue_with_new_weights(lora):
    task = kpt.GRPOTask.from_preset(
        one_layer(REFERENCE / "models/llama3"), sequence_length=256, lora=lora
    )
    contract.check_overlap(engine_of(task), task)


# Numbers


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_the_reference(name):
    """Alone, and with samples of other lengths and temperatures."""
    case = CASES[name]
    task = shared(case["inputs"]["model"].removeprefix("models/"))
    engine = with_slots(task)
    new = case["settings"]["max_new_tokens"]
    requests = [
        Request(p, max_tokens=new, temperature=0)
        for p in case["inputs"]["prompts"]
    ]
    others = [
        Request([7, 8, 9], 5, max_tokens=3, seed=4),
        Request([17] * 20, 2, max_tokens=40, temperature=0.4, seed=4),
    ]
    mixed = engine.generate([others[0], *requests, others[1]])[1:-1]
    for alone, row, together in zip(requests, case["expected"]["rows"], mixed):
        for [c] in (*engine.generate([alone]), together):
            assert c.token_ids == row["new_ids"]
            np.testing.assert_allclose(
                c.per_token_logps, row["logprobs"], atol=2e-5
            )


@pytest.mark.parametrize(
    "model",
    in_ci("gemma3_text", "llama3", of=FAMILIES.values()),
    ids=FAMILIES,
)
def test_slots_and_order_change_nothing(model):
    """Tokens equal for 1, 8 and 128 slots; log-probs are the policy's."""
    task = shared(model)
    prompts = [row["token_ids"] for row in random_rows(5, 1, 40, seed=3)]
    requests = [
        Request(p, 1 + i, max_tokens=5 * i + 3, temperature=t, seed=i % 2)
        for i, (p, t) in enumerate(zip(prompts, (1.0, 0.5, 1.4, 1.0, 0.8)))
    ]
    outs = [with_slots(task, n).generate(requests) for n in (128, 8)]
    if model == "llama3":
        outs.append(with_slots(task, 1).generate(requests))
    outs.append(with_slots(task, 8).generate(requests[::-1])[::-1])
    engine = with_slots(task)
    for out in outs:
        assert ids(out) == ids(outs[0])
    for out in outs:
        for request, samples in zip(requests, out):
            scores = engine.score(
                [[*request.token_ids, *c.token_ids] for c in samples],
                temperature=request.temperature,
            )
            limit = 2e-5 * max(1, 1 / request.temperature)
            for c, s in zip(samples, scores):
                np.testing.assert_allclose(
                    c.per_token_logps,
                    s.per_token_logps[len(request.token_ids) :],
                    rtol=0,
                    atol=limit,
                )


def test_samples_follow_the_distribution():
    """Chi-square of 4,000 first tokens, free and among the best."""
    task, prompt = shared(), [5, 17, 101]
    engine = with_slots(task, 256)
    [score] = engine.score([[*prompt, 0]], top_k=512)
    logps = np.zeros(512)
    logps[score.top_ids[-1]] = score.top_logps[-1]
    best = score.top_ids[-1]
    kept = {
        "free": ({}, best),
        "top_k": ({"top_k": 6}, best[:6]),
        "top_p": (
            {"top_p": 0.3},
            best[: 1 + (np.exp(score.top_logps[-1]).cumsum() < 0.3).sum()],
        ),
        "min_p": (
            {"min_p": 0.4},
            best[score.top_logps[-1] >= score.top_logps[-1, 0] + np.log(0.4)],
        ),
    }
    for cut, tokens in kept.values():
        request = Request(prompt, 4000, max_tokens=1, seed=11, **cut)
        [samples] = engine.generate([request])
        counts = np.bincount([c.token_ids[0] for c in samples], minlength=512)
        assert counts[np.setdiff1d(np.arange(512), tokens)].sum() == 0
        share = np.exp(logps[tokens])
        expected = 4000 * share / share.sum()
        often = expected >= 5
        found = np.append(counts[tokens][often], counts[tokens][~often].sum())
        expected = np.append(expected[often], expected[~often].sum())
        found, expected = found[expected > 0], expected[expected > 0]
        statistic = ((found - expected) ** 2 / expected).sum()
        degrees = len(expected) - 1
        # Six standard deviations of the statistic.
        assert statistic < degrees + 6 * np.sqrt(2 * degrees)


# The adapter, and quantized weights


def adapted_task(**kwargs):
    task = make(lora=kpt.LoRA(rank=4), **kwargs)
    for b in task.adapter.b:
        b.assign(np.random.default_rng(1).normal(0, 0.05, b.shape))
    return task


def test_a_merged_adapter_gives_the_same():
    task = adapted_task()
    kernels = [np.array(v.value) for v in task.causal_lm.weights]
    requests = [Request([5, 6, 7], 4, max_tokens=12, seed=0)]
    engine = engine_of(task, merge_adapter=True)
    merged = engine.generate(requests)
    engine.merge_adapter = False
    added = engine.generate(requests)
    assert ids(merged) == ids(added)
    task.merge_adapter()
    by_hand = engine.generate(requests)
    task.unmerge_adapter()
    plain = with_slots(shared()).generate(requests)
    for left, right, third in zip(merged[0], added[0], by_hand[0]):
        np.testing.assert_allclose(
            left.per_token_logps, right.per_token_logps, atol=2e-5
        )
        np.testing.assert_allclose(
            left.per_token_logps, third.per_token_logps, atol=2e-5
        )
    assert ids(plain) != ids(merged)
    for before, variable in zip(kernels, task.causal_lm.weights):
        np.testing.assert_array_equal(before, np.asarray(variable.value))


def test_an_adapter_in_sixteen_bits_is_not_rounded_away():
    engine = engine_of(adapted_task(dtype="bfloat16"))
    [[c]] = engine.generate([Request([5, 6, 7], max_tokens=8, seed=0)])
    [score] = engine.score([[5, 6, 7, *c.token_ids]])
    # Both are bfloat16 computations of one thing.
    np.testing.assert_allclose(
        c.per_token_logps, score.per_token_logps[3:], atol=0.1
    )
    assert not engine._merges(engine.model.adapter)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantized_models(mode):
    task = make()
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    task.causal_lm.backbone.quantize(
        mode, filters=lambda layer: isinstance(layer, kinds)
    )
    task = kpt.SFTTask(task.causal_lm, None, sequence_length=64)
    engine = engine_of(task)
    [[c]] = engine.generate([Request([5, 6, 7], max_tokens=8, seed=0)])
    [score] = engine.score([[5, 6, 7, *c.token_ids]])
    # int8 rounds activations too: a last bit may fall to either side.
    np.testing.assert_allclose(
        c.per_token_logps, score.per_token_logps[3:], atol=2e-2
    )


# Slots


def test_a_prompt_is_computed_once(monkeypatch):
    """However few the slots: 3 prompts of 6 samples, 4 slots."""
    computed = []
    prefill = decoding.SlotDecoder.prefill

    def counting(self, weights, prompts, *others):
        computed.extend(prompts)
        return prefill(self, weights, prompts, *others)

    monkeypatch.setattr(decoding.SlotDecoder, "prefill", counting)
    prompts = [[5, 6, 7], [9, 8], [11, 3, 200, 17, 4]]
    requests = [
        Request(p, 6, max_tokens=9 + i, seed=2) for i, p in enumerate(prompts)
    ]
    few = with_slots(shared(), 4).generate(requests)
    assert sorted(computed) == sorted(tuple(p[:-1]) for p in prompts)
    assert ids(few) == ids(with_slots(shared(), 32).generate(requests))


def test_a_sample_seated_before_slots_move_keeps_its_prompt():
    """The 33rd sample takes slot 31, which has its prompt; that it alone is
    left makes the slots fewer and moves it."""
    requests = [Request([40 + i, 7], max_tokens=1, seed=5) for i in range(31)]
    requests.append(Request([9, 8, 11], 2, max_tokens=1, seed=5))
    moved = with_slots(shared(), 32).generate(requests)
    assert ids(moved) == ids(with_slots(shared(), 64).generate(requests))


def test_the_cache_keeps_its_budget(monkeypatch):
    """At every moment, also while it is resized."""
    task, sizes = shared(), []
    allocate, resize = decoding.SlotDecoder.allocate, decoding.SlotDecoder

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    def allocated(self, *args):
        allocate(self, *args)
        sizes.append(size(self.cache))

    def one_layer(self, *args, plain=resize.resize):
        before = size(self.cache)
        plain(self, *args)
        layers = len(self.cache)
        after = size(self.cache)
        sizes.append(max(before, after) + max(before, after) // layers)

    monkeypatch.setattr(decoding.SlotDecoder, "allocate", allocated)
    monkeypatch.setattr(decoding.SlotDecoder, "resize", one_layer)
    budget = 2 * 2**20
    engine = engine_of(task, cache_bytes=budget)
    requests = [
        Request([5 + i] * (1 + i), max_tokens=100 + i, seed=i)
        for i in range(40)
    ]
    out = engine.generate(requests)
    assert max(sizes) <= budget and len(sizes) > 1
    assert all(len(c.token_ids) >= 100 for [c] in out)
    few = with_slots(task, 2).generate(requests[:6])
    assert ids(few) == ids(out[:6])
    assert engine._decoder.cache is None


def test_a_budget_for_no_slot_is_refused():
    engine = engine_of(shared(), cache_bytes=10_000)
    with pytest.raises(ValueError) as error:
        engine.generate([Request([1, 2], max_tokens=300)])
    for part in ("does not hold one sequence", "9.766 KiB", "=10000"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "kwargs",
    [{"num_slots": 0}, {"cache_bytes": 0}, {"merge_adapter": "yes"}],
)
def test_settings_are_checked(kwargs):
    [(name, value)] = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        NativeRollout(**kwargs)


def test_nothing_grows_over_a_thousand_requests():
    engine = engine_of(shared(), 16)
    rng = np.random.default_rng(0)

    def some(count):
        out = engine.generate(
            [
                Request(
                    rng.integers(3, 500, rng.integers(1, 30)).tolist(),
                    max_tokens=int(rng.integers(1, 12)),
                    stop_token_ids=[7],
                    seed=i,
                )
                for i in range(count)
            ]
        )
        assert len(out) == count

    for _ in range(3):
        some(100)
    arrays = len(jax.live_arrays())
    for _ in range(7):
        some(100)
    assert len(jax.live_arrays()) <= arrays
    # Four prefills, three fills or copies, one or two decodes.
    assert len(engine.programs) <= 12


def test_a_call_in_training_sees_the_weights_of_that_moment():
    task = make()
    task.compile(optimizer=keras.optimizers.SGD(0.5))
    seen = []

    class Sampling(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            [[c]] = engine.generate(
                [Request([5, 6, 7], max_tokens=8, temperature=0)]
            )
            row = {"token_ids": [5, 6, 7, *c.token_ids]}
            row["completion_mask"] = [1] * len(row["token_ids"])
            [logps] = self.model.log_probs([row])
            np.testing.assert_allclose(c.per_token_logps, logps[3:], atol=2e-5)
            seen.append(c.per_token_logps)

    engine = engine_of(task)
    task.fit(
        random_rows(8), batch_size=4, epochs=3, verbose=0,
        callbacks=[Sampling()],
    )  # fmt: skip
    assert not np.array_equal(seen[0], seen[1])


def test_a_model_that_gives_no_numbers_is_an_error():
    task = make()
    task.causal_lm.backbone.layer_norm.scale.assign(
        np.full(task.causal_lm.backbone.hidden_dim, np.nan)
    )
    with pytest.raises(
        ValueError, match="NaN or infinity for a token of request 0"
    ):
        engine_of(task).generate([Request([1], max_tokens=2)])


def test_a_long_prompt_and_windows():
    """Prompts beyond a sliding window, with short ones."""
    engine = with_slots(shared("gemma3_text"))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 500, n).tolist() for n in (90, 2, 33)]
    out = engine.generate(
        [Request(p, 2, max_tokens=30, seed=1) for p in prompts]
    )
    for p, samples in zip(prompts, out):
        scores = engine.score([[*p, *c.token_ids] for c in samples])
        for c, s in zip(samples, scores):
            np.testing.assert_allclose(
                c.per_token_logps, s.per_token_logps[len(p) :], atol=2e-5
            )
