"""Prompts that are read once for all their samples: the same numbers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import key_values
from keras_posttrain.models.key_values import KeyValues
from keras_posttrain.models.prefix_key_values import (
    PrefixGroups,
    PrefixKeyValues,
)
from keras_posttrain.rollout import Request
from keras_posttrain.rollout.native import prefix_groups, schedule
from keras_posttrain.rollout.native.prefix_groups import (
    GroupSizes,
    find,
    own_columns,
)
from keras_posttrain.rollout.native.samples import Samples
from tests.models.tiny_checkpoints import GEMMA4_E2B, make_checkpoint
from tests.rollout.test_prefill_chunk import check_same, engine_of, tokens
from tests.rollout.test_window_cache import check_trainers
from tests.support import REFERENCE, in_ci


@pytest.fixture
def small(monkeypatch):
    """Groups of few slots and short prompts are used too."""
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 0)


@functools.cache
def reference(model):
    return kpt.SFTTask.from_preset(
        REFERENCE / "models" / model, sequence_length=320
    )


def converted(directory, kind, **config):
    found, _ = make_checkpoint(
        directory / "hf", kind, **{"max_position_embeddings": 320} | config
    )
    return kpt.SFTTask.from_preset(found, sequence_length=320)


def requests(max_tokens=70):
    """Groups of unequal sizes, prompts of one token, and one sample alone."""
    groups = [(60, 3), (24, 4), (1, 2), (60, 4), (7, 1)]
    return [
        Request(tokens(length, i), count, max_tokens=max_tokens, seed=i)
        for i, (length, count) in enumerate(groups)
    ]


def grouped(engine):
    """The programs that read prompts once."""
    return [x for x in engine.programs if "of a sample" in x]


def without_groups(monkeypatch, task, asked, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "can_group", lambda placement: False)
        engine = engine_of(task, **settings)
        found = engine.generate(asked)
    assert not grouped(engine)
    return found


def check_task(monkeypatch, task, asked=None, **settings):
    asked = requests() if asked is None else asked
    expected = without_groups(monkeypatch, task, asked, **settings)
    engine = engine_of(task, **settings)
    found = engine.generate(asked)
    assert grouped(engine)
    check_same(found, expected)
    pairs = [
        (request.token_ids, sample)
        for request, samples in zip(asked, found)
        for sample in samples
    ]
    check_trainers(engine, pairs)
    return engine, found


# Soft caps and windows; windows of some layers; norms of queries and keys.
@pytest.mark.parametrize(
    "model",
    in_ci("llama3", "gemma2", of=["llama3", "gemma2", "gemma3_text", "qwen3"]),
)
def test_families(small, monkeypatch, model):
    engine, _ = check_task(monkeypatch, reference(model))
    assert len(grouped(engine)) > 1


def test_sinks(small, monkeypatch, tmp_path):
    task = converted(tmp_path, "gpt_oss", num_hidden_layers=2)
    check_task(monkeypatch, task)


@pytest.mark.full
def test_layers_that_read_the_cache_of_others(small, monkeypatch, tmp_path):
    task = converted(tmp_path, "gemma4_text", **GEMMA4_E2B)
    check_task(monkeypatch, task)


def test_recurrent_layers(small, monkeypatch, tmp_path):
    check_task(monkeypatch, converted(tmp_path, "qwen3_5_text"))


def test_experts_are_recorded(small, monkeypatch, tmp_path):
    task = converted(tmp_path, "mixtral", num_hidden_layers=2)
    asked = [
        Request(
            tokens(60, i), 4, max_tokens=40, seed=i, return_routed_experts=True
        )
        for i in range(2)
    ]
    expected = without_groups(monkeypatch, task, asked)
    engine = engine_of(task)
    found = engine.generate(asked)
    assert grouped(engine)
    for ours, theirs in zip(sum(found, []), sum(expected, [])):
        np.testing.assert_array_equal(
            ours.routed_experts, theirs.routed_experts
        )


def test_keys_in_blocks(small, monkeypatch):
    monkeypatch.setattr(key_values, "LEAST_IN_BLOCKS", 1)
    check_task(monkeypatch, reference("gemma2"))


def test_slots_that_samples_take_in_turn(small, monkeypatch):
    """Groups lose members and get others while samples wait for slots."""
    rng = np.random.default_rng(1)
    stops = rng.choice(np.arange(3, 500), 20, replace=False).tolist()
    asked = [
        Request(tokens(70, i), 4, max_tokens=60, seed=i, stop_token_ids=stops)
        for i in range(8)
    ]
    engine, found = check_task(
        monkeypatch, reference("llama3"), asked, num_slots=16
    )
    assert len({len(s.token_ids) for group in found for s in group}) > 9
    assert {x.split()[2] for x in grouped(engine)} == {"16"}


def test_an_interrupted_sample_continues_in_its_group(small, monkeypatch):
    """Tokens drawn before count as its own: the group has the prompt."""
    drawn = [tokens(n, 90 + n) for n in (3, 17, 30)]
    prompt = tokens(60, 5)
    asked = [
        Request([*prompt, *more], max_tokens=20, seed=i, drawn=len(more))
        for i, more in enumerate(drawn)
    ]
    samples = Samples(asked)
    assert GroupSizes.of_samples(samples) == GroupSizes(1, 4, 64)
    check_task(monkeypatch, reference("llama3"), asked)


def test_a_prompt_that_several_requests_have(small, monkeypatch):
    """They are one group, or several if they are more than its members."""
    asked = [
        Request(tokens(60, 0), count, max_tokens=8, seed=seed)
        for seed, count in enumerate([2, 1, 4])
    ]
    engine, _ = check_task(monkeypatch, reference("llama3"), asked)
    assert "1 prompts of 64 tokens with 8 samples" in grouped(engine)[0]


def test_conversations(small, monkeypatch):
    """The first turns of several conversations are a group."""
    task = reference("llama3")

    def turns():
        engine = engine_of(task)
        with engine.session() as session:
            asked = [
                Request(tokens(60, 3), max_tokens=12, seed=seed)
                for seed in range(4)
            ]
            found = [x.result() for x in [session.submit(r) for r in asked]]
        return engine, found

    engine, found = turns()
    assert "1 prompts of 64 tokens with 4 samples" in grouped(engine)[0]
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "can_group", lambda placement: False)
        _, expected = turns()
    check_same(found, expected)


def test_copies_keep_the_budget(small):
    """Without memory for the copies of what is read there are no groups."""
    task = reference("llama3")
    engine = engine_of(task)
    engine.generate(requests(8))
    assert grouped(engine)
    layers = engine._decoder.layer_bytes(128 + 32)
    slots = len(sum(engine.generate(requests(8)), []))
    budget = 16 * (sum(layers) + max(layers))
    assert slots <= 16
    engine = engine_of(task, cache_bytes=budget)
    engine.generate(requests(8))
    assert not grouped(engine)


def test_groups_are_for_many_slots(monkeypatch):
    """By default: a cache of 128 slots, and not one of 16."""
    task = reference("llama3")
    asked = [
        Request(tokens(60, i), 8, max_tokens=2, seed=i) for i in range(16)
    ]
    engine = engine_of(task)
    engine.generate(asked[:2])
    assert not grouped(engine)
    check_task(monkeypatch, task, asked)


def test_the_sizes_of_groups():
    sizes = GroupSizes.of(5, 6, 70)
    assert sizes == GroupSizes(prompts=8, members=8, columns=96)
    assert [sizes.count(n) for n in (128, 16, 8, 2, 1)] == [8, 8, 4, 1, 0]
    assert GroupSizes.of(5, 1, 70).count(128) == 0
    assert GroupSizes.of(64, 8, 70).count(64) == 32
    both = sizes.joined(GroupSizes(2, 16, 64))
    assert both == GroupSizes(8, 16, 96)
    alone = Request(tokens(200, 0), max_tokens=2, seed=0)
    twice = Request(tokens(90, 1), 3, max_tokens=2, seed=0)
    found = GroupSizes.of_samples(Samples([alone, twice]))
    assert found == GroupSizes(prompts=1, members=4, columns=96)
    assert GroupSizes.of_samples(Samples([alone])).count(128) == 0
    found = [own_columns(n) for n in (0, 1, 64, 65, 100, 200)]
    assert found == [0, 64, 64, 96, 128, 256]


def test_groups_pay_if_they_leave_less_to_read():
    sizes = GroupSizes(prompts=8, members=8, columns=96)
    # 8 x 96 and 64 x 128 of 64 x 256 columns: 0.55 of them.
    assert sizes.pays(64, 256, 128)
    # 8 x 96 and 64 x 64 of 64 x 128: 3,328 are saved.
    assert not sizes.pays(64, 128, 64)
    # 8 x 96 and 512 x 128 of 512 x 144: 0.9.
    assert not sizes.pays(512, 144, 128)
    # More columns than the cache has.
    assert not sizes.pays(512, 64, 0)
    assert not sizes.pays(1, 10_000, 0)


def test_slots_and_groups(monkeypatch, small):
    asked = [
        Request(tokens(60, i), count, max_tokens=8, seed=i)
        for i, count in enumerate([3, 2, 1])
    ]
    a, b, c, d, e, f = Samples(asked)
    sizes = GroupSizes(prompts=4, members=2, columns=64)
    occupants = [a, d, None, b, e, c, f, None]
    lengths = np.array([62, 59, 80, 63, 60, 59, 59, 0])
    # The third sample of a prompt is alone, and all its tokens its own.
    assert find(sizes, occupants, lengths, 64) is None
    found = find(sizes, occupants, lengths, 256)
    assert (found.columns, found.own) == (64, 64)
    groups = found.groups
    assert groups.members.tolist() == [[0, 3], [1, 4], [0, 0], [0, 0]]
    assert groups.places.tolist() == [0, 2, 0, 1, 3, 0, 0, 0]
    assert groups.shared.tolist() == [59, 59, 0, 59, 59, 0, 0, 0]
    assert find(sizes, [None] * 8, lengths, 256) is None
    # More groups than there is room for.
    monkeypatch.setattr(prefix_groups, "MOST_GROUPS", 1 / 4)
    assert find(sizes, occupants, lengths, 256) is None


@pytest.mark.parametrize("block", [None, 64])
def test_a_divided_cache_has_the_columns_of_the_whole(monkeypatch, block):
    if block:
        monkeypatch.setattr(key_values, "LEAST_IN_BLOCKS", 1)
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(4, 192, 2, 8)).astype("float32")
    cache = KeyValues.zeros(4, 192, 2, 8, "float32")
    cache = cache.fill(jnp.arange(4), jnp.array(whole), jnp.array(-whole))
    shared = np.array([50, 50, 0, 150], "int32")
    groups = PrefixGroups(
        np.array([[0, 1], [3, 0]], "int32"),
        np.array([0, 1, 0, 2], "int32"),
        shared,
    )
    found = PrefixKeyValues.divided(cache, groups, 160, 64)
    assert found.prefixes.keys.shape == (2, 2, 8, 160)
    prefixes = np.moveaxis(np.asarray(found.prefixes.keys), 3, 1)
    np.testing.assert_array_equal(prefixes[0], whole[0, :160])
    np.testing.assert_array_equal(prefixes[1], whole[3, :160])
    # The last own columns are the last ones of the cache.
    assert np.asarray(found.begins).tolist() == [50, 50, 0, 128]
    lengths = np.array([60, 114, 64, 160])
    held = np.asarray(found.positions(lengths))
    values = np.moveaxis(np.asarray(found.own.values), 2, 1)
    for slot in range(4):
        own = range(shared[slot], lengths[slot])
        assert [p for p in held[slot] if p >= 0] == list(own)
        np.testing.assert_array_equal(
            values[slot][held[slot] >= 0], -whole[slot, list(own)]
        )
