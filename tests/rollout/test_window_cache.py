"""Caches of the size of a sliding window give the numbers of whole ones."""

import functools

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import attention, key_values, window_key_values
from keras_posttrain.models.key_values import KeyValues, joined_keys
from keras_posttrain.models.window_key_values import with_window
from keras_posttrain.rollout import Request
from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.samples import Samples
from tests.models.tiny_checkpoints import GEMMA4_E2B, make_checkpoint
from tests.rollout.test_prefill_chunk import check_same, engine_of
from tests.support import REFERENCE, in_ci

# The columns of a ring for the window of the reference model, of 8 tokens.
RING = 64


def make():
    return kpt.SFTTask.from_preset(
        REFERENCE / "models/gemma2", sequence_length=320
    )


@functools.cache
def task():
    return make()


def tokens(count, seed):
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


def requests():
    """Prompts shorter and longer than the window and the ring, in groups."""
    shared = tokens(100, 9)
    prompts = [
        (tokens(3, 0), 1),
        (tokens(RING + 1, 1), 3),
        (tokens(40, 2), 2),
        ([*shared, *tokens(130, 3)], 2),
        ([*shared, *tokens(30, 4)], 1),
    ]
    return [
        Request(ids, count, max_tokens=40 + 30 * (i % 2), seed=i)
        for i, (ids, count) in enumerate(prompts)
    ]


def check_trainers(engine, samples, atol=2e-5):
    """Pairs of a prompt and a sample have the trainer's log-probabilities."""
    scores = engine.score([[*p, *s.token_ids] for p, s in samples])
    for (prompt, sample), score in zip(samples, scores):
        logps = getattr(sample, "per_token_logps", None)
        logps = sample.logps if logps is None else logps
        want = score.per_token_logps[len(prompt) :]
        np.testing.assert_allclose(logps, want, atol=atol)


def columns(engine):
    """The columns of each layer's cache, with 256 tokens a slot."""
    cache = jax.eval_shape(lambda: engine._decoder._zeros(2, 256))
    return [layer.num_columns for layer in cache]


@functools.cache
def whole():
    """The samples of an engine whose layers all have whole caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "with_window", lambda cache, window: cache)
        engine = engine_of(task())
        found = engine.generate(requests())
    assert columns(engine) == [256, 256, 256]
    return found


def test_samples_are_those_of_whole_caches():
    """Few slots: they change hands, grow, shrink and are copied."""
    engine = engine_of(task(), 4)
    found = engine.generate(requests())
    assert columns(engine) == [RING, 256, RING]
    check_same(found, whole())
    check_trainers(
        engine,
        [
            (request.token_ids, sample)
            for request, samples in zip(requests(), found)
            for sample in samples
        ],
    )


def test_pieces_longer_than_the_ring(monkeypatch):
    """In blocks; `test_rings_of_just_the_window` has them without."""
    monkeypatch.setattr(attention, "KEEP_SCORES", 0)
    engine = engine_of(task(), prefill_chunk=2 * RING)
    check_same(engine.generate(requests()), whole())
    assert f"by {2 * RING} tokens" in "\n".join(engine.programs)


def test_eight_devices(eight_devices, monkeypatch):
    found = whole()
    monkeypatch.setattr(attention, "KEEP_SCORES", 0)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(4, 2)
    )
    engine = engine_of(make(), prefill_chunk=RING)
    check_same(engine.generate(requests()), found)
    assert columns(engine) == [RING, 256, RING]


def test_conversations_that_continue_in_another_way():
    """A ring that has lost what they need is computed again, and counted."""
    engine = engine_of(task())
    short, long = tokens(30, 1), tokens(150, 2)
    # The last tokens of each are others.
    turns = [short, long, [*short[:20], 7, 8], [*long[:140], 7, 8]]
    found, computed = [], []
    with engine.session() as session:
        for i in range(5):
            request = Request(turns[i], max_tokens=5, seed=i)
            [completion] = session.submit(request).result()
            found.append((turns[i], completion))
            computed.append(session.counts.computed)
            if i == 3:
                # The last turn is continued.
                said = completion.token_ids
                turns.append([*turns[i], *said, *tokens(90, 3)])
    # A prompt without its last token, and 5 tokens sampled after it.
    assert np.diff(computed).tolist() == [149 + 5, 1 + 5, 141 + 5, 90 + 5]
    assert session.counts.recomputed == 140
    check_trainers(engine, found)


def test_beginnings_are_computed_once():
    """Prompts that come together stop where others begin to differ."""
    start, middle = tokens(70, 1), tokens(40, 2)
    prompts = [
        [*start, *middle, *tokens(70, 3)],
        [*start, *tokens(20, 4)],
        [*start, *middle, *tokens(30, 5)],
        # All but the last token is such a beginning.
        [*start, 7],
    ]
    samples = Samples(
        [Request(ids, 2, max_tokens=3, seed=0) for ids in prompts]
    )
    engine = engine_of(task())
    engine._refresh()
    schedule = engine._schedule()
    schedule.add(samples)
    while schedule.is_busy:
        schedule.advance(engine._decoder_weights(), 0)
    assert schedule.counts.computed == 70 + 40 + 69 + 19 + 29 + 8 * 3
    assert schedule.counts.recomputed == 0
    check_trainers(engine, [(s.prompt, s) for s in samples])


FAMILIES = {
    # Layers that read the caches of others.
    "gemma4": ("gemma4_text", GEMMA4_E2B, [5, 128]),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "num_kv_shared_layers": 1,
            "activation_sparsity_pattern": [0.95, 0.0, 0.5],
        },
        [5, 128],
    ),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2}, [4, 128]),
}


# Gemma 3n shares caches as Gemma 4 does.
@pytest.mark.parametrize("family", in_ci("gemma4", "gpt-oss", of=FAMILIES))
def test_rings_of_just_the_window(family, tmp_path, monkeypatch):
    """Each token is in the place of the one that left the window."""
    monkeypatch.setattr(window_key_values, "COLUMNS", 1)
    model_type, fields, expected = FAMILIES[family]
    directory, _ = make_checkpoint(tmp_path / "hf", model_type, **fields)
    engine = engine_of(
        kpt.SFTTask.from_preset(directory, sequence_length=128),
        prefill_chunk=64,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, n).tolist() for n in (3, 20, 75)]
    out = engine.generate(
        [Request(p, 2, max_tokens=15, seed=i) for i, p in enumerate(prompts)]
    )
    cache = jax.eval_shape(lambda: engine._decoder._zeros(2, 128))
    assert [layer.num_columns for layer in cache] == expected
    assert "by 64 tokens" in "\n".join(engine.programs)
    samples = [(p, s) for p, group in zip(prompts, out) for s in group]
    check_trainers(engine, samples, atol=5e-5)


def test_the_budget_counts_the_smaller_caches():
    """Keys and values: 2 arrays of float32; 2 of 3 layers have 64 columns."""
    engine = engine_of(task())
    engine._refresh()
    decoder = engine._decoder
    _, heads, _, dim = decoder.empty[0].values.shape
    column = 2 * 4 * heads * dim
    assert decoder.slot_bytes(48) == column * 3 * 48
    assert decoder.slot_bytes(2048) == column * (2 * RING + 2048)
    # The largest layer exists twice while it is resized.
    most = column * (2 * RING + 2 * (2048 + decoding.STEPS))
    assert engine._fitting(10 * most, 2048) == 10
    assert engine._fitting(10 * most - 1, 2048) == 9
    cache = jax.eval_shape(lambda: decoder._zeros(3, 2048))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert size == 3 * decoder.slot_bytes(2048)


SLOTS = 6


class Slots:
    """A cache, and lists of the tokens that its slots have been given.

    Each token is a number of its own, all of whose keys and values it is.
    """

    def __init__(self, tokens, window):
        empty = KeyValues.zeros(1, 1, 2, 3, "float32")
        self.cache = with_window(empty, window).empty(SLOTS, tokens)
        self.window = window
        self.ids = [[] for _ in range(SLOTS)]
        self.count = 0

    @property
    def lengths(self):
        return np.array([len(x) for x in self.ids], "int32")

    def new(self, counts, width):
        """Lists of so many new tokens, and arrays of them and of others."""
        rows = []
        found = np.full((len(counts), width), -1.0, "float32")
        for row, count in zip(found, counts):
            rows.append(list(range(self.count, self.count + count)))
            row[:count] = rows[-1]
            self.count += count
        return rows, found[..., None, None] * np.ones((2, 3), "float32")

    def fill(self, slots, counts, width=16):
        rows, x = self.new(counts, width)
        index = np.array(self.cache.prompt_tokens(np.array(counts), width))
        index = np.broadcast_to(index, (len(counts), index.shape[-1]))
        x = np.take_along_axis(x, index[..., None, None], 1)
        self.cache = self.cache.fill(np.array(slots), x, x)
        for slot, row in zip(slots, rows):
            if slot < SLOTS:
                self.ids[slot] = row

    def append(self, counts):
        rows, x = self.new(counts, 8)
        other = KeyValues(np.moveaxis(x, 1, 3), np.moveaxis(x, 1, 2))
        self.cache = self.cache.append(self.lengths, np.array(counts), other)
        self.ids = [[*ids, *row] for ids, row in zip(self.ids, rows)]

    def extend(self, slots, counts):
        rows, x = self.new(counts, 9)
        self.cache = self.cache.extend(
            np.array(slots), self.lengths[slots], np.array(counts), x, x
        )
        for slot, row in zip(slots, rows):
            self.ids[slot] = [*self.ids[slot], *row]

    def copy(self, source, target, tokens):
        self.cache = self.cache.copy(
            np.array([source]), np.array([target]), tokens
        )
        self.ids[target] = self.ids[source]

    def resize(self, order, tokens):
        self.cache = self.cache.resize(np.array(order), tokens)
        self.ids = [self.ids[i] for i in order]

    def check(self):
        """The last tokens of each slot are where `positions` says."""
        held = np.array(self.cache.positions(self.lengths))
        keys = np.array(joined_keys(self.cache.keys))
        values = np.array(self.cache.values)
        window = self.window or self.count
        for slot, ids in enumerate(self.ids):
            found = {p: c for c, p in enumerate(held[slot]) if p >= 0}
            assert set(found) <= set(range(len(ids)))
            for position in range(max(len(ids) - window, 0), len(ids)):
                column = found[position]
                assert (keys[slot, :, :, column] == ids[position]).all()
                assert (values[slot, :, column] == ids[position]).all()


@pytest.mark.parametrize(
    "window, tokens, block, shape",
    [
        (5, 64, 64, (3, 5)),
        (6, 64, 2, (3, 3, 2)),
        (None, 200, 64, (3, 200)),
        (None, 200, 4, (50, 3, 4)),
    ],
)
def test_any_sequence_of_writes(monkeypatch, window, tokens, block, shape):
    """In rings and in whole caches, with keys in blocks and without."""
    monkeypatch.setattr(window_key_values, "COLUMNS", 1)
    monkeypatch.setattr(key_values, "BLOCK", block)
    monkeypatch.setattr(key_values, "LEAST_IN_BLOCKS", 5)
    rng = np.random.default_rng(0)
    # Shorter than the window at first, and without blocks.
    slots = Slots(4, window)
    slots.fill([0, 1, 2, 4], [1, 2, 3, 4], 4)
    slots.extend([0, 3], [2, 1])
    slots.check()
    slots.resize(range(SLOTS), tokens)
    slots.check()
    assert slots.cache.keys.shape == (SLOTS, 2, *shape)
    for _ in range(10):
        chosen = rng.permutation(SLOTS).tolist()
        slots.append(rng.integers(0, 9, SLOTS).tolist())
        slots.check()
        slots.extend(chosen[:3], [0, 9, 2])
        slots.check()
        slots.copy(*chosen[3:5], tokens)
        slots.check()
        # The last one is padding.
        slots.fill([*chosen[:2], SLOTS], rng.integers(1, 13, 3).tolist(), 13)
        slots.check()
        slots.resize(chosen, tokens)
        slots.check()
    assert max(slots.lengths) > 12
