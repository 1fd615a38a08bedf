"""Drafts: several tokens of a pass, and the samples of one token a pass."""

import functools
import json

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.native import drafts
from keras_posttrain.rollout.native.samples import Samples
from tests.models.mixtures import make_mixture
from tests.models.tiny_checkpoints import make_checkpoint
from tests.rollout import contract
from tests.rollout.test_compiled_ahead import later_programs
from tests.rollout.test_compiled_ahead import make as make_run
from tests.rollout.test_distribution import layout
from tests.support import REFERENCE, one_layer


def draft_always(patch):
    """Drafts in each call of the decoder, of 3 tokens from 5 slots on."""
    patch.setattr(drafts.Drafts, "width", lambda _, n: 8 if n < 5 else 4)
    patch.setattr(drafts.Drafts, "_pays", lambda *_: True)


@pytest.fixture
def always(monkeypatch):
    draft_always(monkeypatch)


def make(model="llama3", length=320, whole=False, **settings):
    directory = REFERENCE / "models" / model
    if model == "llama3" and not whole:
        directory = one_layer(directory)
    return kpt.SFTTask.from_preset(
        directory, sequence_length=length, **settings
    )


shared = functools.cache(make)


def engine_of(task, slots=8, **settings):
    settings = {"drafts": True, **settings}
    engine = NativeRollout(slots, **settings)
    engine.set_model(task)
    return engine


@functools.cache
def plain_engine(task):
    """An engine without drafts, compiled once for all tests."""
    return engine_of(task, drafts=False)


def requests(seed=0):
    """Groups of prompts of many lengths, temperatures, cuts and ends."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 500, n).tolist() for n in (1, 5, 70, 30, 9)]
    # One prompt comes twice, and one text repeats itself.
    prompts += [prompts[1], prompts[4] * 6]
    settings = [
        {"temperature": 0.0, "max_tokens": 90},
        {"temperature": 0.05, "max_tokens": 33},
        {"temperature": 0.3, "max_tokens": 40, "top_k": 4},
        {"temperature": 0.6, "max_tokens": 50, "top_p": 0.5},
        {"temperature": 1.0, "stop_token_ids": range(40)},
        {"temperature": 0.02, "stop_token_ids": range(100), "max_tokens": 64},
        {"temperature": 0.02, "max_tokens": 7},
    ]
    return [
        Request(ids, 1 + i % 3, seed=seed + i, **more)
        for i, (ids, more) in enumerate(zip(prompts, settings))
    ]


def check_equal(found, want, atol=2e-5):
    for left, right in zip(found, want, strict=True):
        for a, b in zip(left, right, strict=True):
            assert a.token_ids == b.token_ids
            assert a.finish_reason == b.finish_reason
            np.testing.assert_allclose(
                a.per_token_logps, b.per_token_logps, rtol=0, atol=atol
            )


def check_trainers(engine, asked, found):
    for request, samples in zip(asked, found):
        scores = engine.score(
            [[*request.token_ids, *c.token_ids] for c in samples],
            temperature=request.temperature,
        )
        limit = 2e-5 * max(1, 1 / (request.temperature or 1))
        for c, score in zip(samples, scores):
            want = score.per_token_logps[len(request.token_ids) :]
            np.testing.assert_allclose(
                c.per_token_logps, want, rtol=0, atol=limit
            )


# Samples


@pytest.mark.parametrize(
    "model, slots",
    [
        # Of the width of the windows, with the caches of the other.
        pytest.param("llama3", 3, marks=pytest.mark.full, id="few-slots"),
        # Those of eight devices are compared with those of one without.
        pytest.param("llama3", 8, marks=pytest.mark.full, id="slots"),
        pytest.param("gemma2", 4, id="windows"),
    ],
)
def test_samples_are_those_without_drafts(always, model, slots):
    """Groups, stop tokens and ends inside of drafts, slots that change hands,
    rings that sequences are longer than; prompts of earlier calls."""
    task = shared(model)
    plain, engine = plain_engine(task), engine_of(task, slots)
    for seed in (0, 100, 0):
        asked = requests(seed)
        engine.metrics()
        found = engine.generate(asked)
        # At 0.02 log-probabilities are 50 times the rounding of logits.
        check_equal(found, plain.generate(asked), atol=1e-3)
        check_trainers(engine, asked, found)
        assert 0 < engine.metrics()["rollout/draft_acceptance"] < 1
    # Now whole samples were known, and ended inside of drafts.
    assert engine.metrics()["rollout/tokens_per_pass"] > 2
    reasons = {c.finish_reason for samples in found for c in samples}
    assert reasons == {"stop", "length"}


def test_known_samples_take_few_passes(always):
    """A sample that is asked for again is its own draft: 1 + 96 / 8 passes."""
    engine, asked = engine_of(shared()), [Request([5, 6, 7], 4, 97, seed=0)]
    before = engine.generate(asked)
    engine.metrics()
    check_equal(engine.generate(asked), before)
    metrics = engine.metrics()
    assert metrics["rollout/tokens_per_pass"] > 6
    assert metrics["rollout/draft_acceptance"] > 0.8
    # Until a rollout follows, the metrics stay.
    assert engine.metrics() == metrics


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, marks=pytest.mark.full, id="all"),
        pytest.param(kpt.LoRA(rank=4), id="lora"),
    ],
)
def test_the_contract(always, lora):
    task = make(length=64, lora=lora)
    engine = engine_of(task, 4)
    contract.check_engine(engine, task)
    assert "tokens a pass" in "\n".join(engine.programs)


def test_samples_continue_with_new_weights(always):
    task = kpt.GRPOTask.from_preset(
        one_layer(REFERENCE / "models/llama3"), sequence_length=256
    )
    engine = engine_of(task)
    contract.check_overlap(engine, task)
    assert "tokens a pass" in "\n".join(engine.programs)


def test_samples_follow_the_distribution(always):
    """Chi-square of first tokens, and of those after the most frequent one,
    where samples of an earlier call are drafts of both."""
    task, prompt, count = shared(whole=True), [5, 17, 101], 2000
    engine = engine_of(task, 64)
    asked = [
        Request(prompt, count, max_tokens=3, temperature=0.4, seed=seed)
        for seed in (1, 2)
    ]
    engine.generate(asked[:1])
    engine.metrics()
    [samples] = engine.generate(asked[1:])
    assert engine.metrics()["rollout/draft_acceptance"] > 0.02
    first = np.array([c.token_ids[0] for c in samples])
    usual = int(np.bincount(first).argmax())
    second = [c.token_ids[1] for c in samples if c.token_ids[0] == usual]
    for context, found in ((prompt, first), ([*prompt, usual], second)):
        [score] = engine.score([[*context, 0]], top_k=512, temperature=0.4)
        want = np.zeros(512)
        want[score.top_ids[-1]] = np.exp(score.top_logps[-1])
        counts = np.bincount(found, minlength=512)
        expected = counts.sum() * want
        often = expected >= 5
        counts = np.append(counts[often], counts[~often].sum())
        expected = np.append(expected[often], expected[~often].sum())
        statistic = ((counts - expected) ** 2 / expected).sum()
        degrees = len(expected) - 1
        assert degrees > 5
        assert statistic < degrees + 6 * np.sqrt(2 * degrees)


def test_eight_devices_give_the_tokens_of_one(always, eight_devices):
    one = plain_engine(shared()).generate(requests())
    keras.distribution.set_distribution(layout(eight_devices))
    engine = engine_of(make(), 8)
    for _ in range(2):
        check_equal(engine.generate(requests()), one, atol=2e-3)
    assert engine.metrics()["rollout/tokens_per_pass"] > 1.3


def test_the_experts_of_tokens(always):
    """They are those of tokens that are taken, in their order."""
    model = make_mixture("Qwen3Moe", num_experts=4, num_layers=2)
    task = kpt.SFTTask(model, sequence_length=128)
    asked = [
        Request(ids, 2, 40, t, seed=0, return_routed_experts=True)
        for ids, t in (([5, 6, 7], 1.0), ([8, 9], 0.1), ([8, 9, 4], 0.0))
    ]
    plain, engine = engine_of(task, drafts=False), engine_of(task)
    engine.generate(asked)
    engine.metrics()
    found, want = engine.generate(asked), plain.generate(asked)
    check_equal(found, want, atol=2e-4)
    for left, right in zip(found, want):
        for a, b in zip(left, right):
            np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
    assert engine.metrics()["rollout/tokens_per_pass"] > 2


def test_what_cannot_have_drafts(always, tmp_path):
    """Recurrent layers and conversations are sampled without."""
    directory, _ = make_checkpoint(tmp_path / "hf", "qwen3_5_text")
    recurrent = kpt.SFTTask.from_preset(directory, sequence_length=64)
    engine = engine_of(recurrent)
    engine.generate([Request([5, 6, 7], 2, 4, seed=0)])
    assert engine.metrics() == {}
    assert "a pass" not in "\n".join(engine.programs)
    engine = engine_of(shared())
    with engine.session() as session:
        session.submit(Request([5, 6, 7], max_tokens=4, seed=0)).result()
    assert "a pass" not in "\n".join(engine.programs)


def test_a_run_logs_metrics_and_compiles_ahead(always):
    class Logs(keras.callbacks.Callback):
        found = []

        def on_train_batch_end(self, batch, logs=None):
            self.found.append(logs)

    task = make_run(compile_ahead=True, drafts=True)
    assert later_programs(task, count=4, callbacks=[Logs()]) == []
    assert "tokens a pass" in "\n".join(task.rollout.programs)
    for logs in Logs.found:
        assert 0 <= logs["rollout/draft_acceptance"] <= 1
        assert logs["rollout/tokens_per_pass"] >= 1


@pytest.mark.parametrize("value", ["auto", 1, None, 7])
def test_wrong_values(value):
    with pytest.raises(ValueError, match="`drafts` must be True or False"):
        NativeRollout(drafts=value)


# What is drafted


def found(sources, suffix, count, xp):
    sources = np.array([sources], "int32")
    suffix = np.array([[-2] * (4 - len(suffix)) + suffix], "int32")
    return np.asarray(drafts.find(sources, suffix, count, xp))[0].tolist()


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_drafts_follow_the_longest_match(xp):
    find = functools.partial(found, count=3, xp=xp)
    assert find([1, 2, 3, 4, 5, -1], [1, 2]) == [3, 4, 5]
    # The longest match, then the last one, then one with a whole draft.
    two = [9, 2, 3, 4, 5, -1, 1, 2, 6, 7, 8, -1, 2, 9, 9, 9, -1]
    assert find(two, [1, 2]) == [6, 7, 8]
    assert find(two, [5, 2]) == [9, 9, 9]
    assert find([1, 2, 3, 4, 5, -1, 1, 2, 8, -1], [1, 2]) == [3, 4, 5]
    # A draft ends where its sequence does, a match does not cross an end.
    assert find([1, 2, 8, -1, 5], [2]) == [8, -1, -1]
    assert find([1, -1, 2, 3, -1], [1, 2]) == [3, -1, -1]
    assert find([1, 2], [1]) == [2, -1, -1]
    assert find([1, 2, 3, -1], [3]) == [-1, -1, -1]
    assert find([1, 2, 3, -1], [7]) == [-1, -1, -1]
    assert find([-1, -1, -1, -1], [7]) == [-1, -1, -1]


def test_what_is_taken_of_a_draft():
    draft = np.array([[1, 2, 3]] * 6, "int32")
    sampled = np.array(
        [
            [1, 2, 3, 4],  # all, and one more
            [1, 2, 9, 3],  # up to the first that differs
            [9, 2, 3, 4],
            [1, 7, 3, 4],  # a stop token that the draft does not have
            [1, 2, 3, 4],  # one within it: 2 stops
            [1, 2, 3, 4],  # idle
        ],
        "int32",
    )
    stop = np.array([[7, -1]] * 4 + [[7, 2], [7, -1]], "int32")
    active = np.arange(6) < 5
    room = np.full(6, 9, "int32")
    take = functools.partial(drafts.accept, draft, sampled, stop, active)
    count, stopped, agree = take(room)
    assert count.tolist() == [4, 3, 1, 2, 2, 0]
    assert stopped.tolist() == [False, False, False, True, True, False]
    assert agree.tolist() == [3, 2, 0, 1, 3, 0]
    # No more than there is room for; a stop behind it does not count.
    count, stopped, _ = take(np.array([2, 2, 2, 1, 1, 1], "int32"))
    assert count.tolist() == [2, 2, 1, 1, 1, 0]
    assert not stopped.any()


# When


def sample(tokens=(), prompt=(5, 6)):
    [found] = Samples([Request(prompt, max_tokens=99, seed=0)])
    found.token_ids = list(tokens)
    return found


def learn(known, plan, tokens, seconds=1.0):
    """What a call gives that samples `tokens` without drafts."""
    out = {
        "tokens": np.array([tokens], "int32").T,
        "taken": np.array([len(tokens)]),
    }
    known.learn(plan, (1, 128), out, seconds, 32)


def test_drafts_begin_and_end_by_what_is_accepted():
    text = list(range(50, 90))
    known = drafts.Drafts()
    known.begin()
    # Nothing is known, so that nothing is drafted.
    plan = known.plan([sample()], 128)
    assert plan.width == 1
    learn(known, plan, text[:32])
    assert known.plan([sample(text[:32])], 128).width == 1
    known.remember(sample(text))
    known.begin()
    # A draft that would have been right.
    plan = known.plan([sample()], 128)
    assert plan.expected.tolist() == [text[:7]]
    learn(known, plan, text[:32])
    plan = known.plan([sample(text[:4])], 128)
    assert plan.width == 8
    assert not set(text) - set(plan.arrays["sources"][0].tolist())
    assert plan.arrays["suffix"].tolist() == [[5, 6, *text[:4]]]
    # Refused ones.
    out = {
        "taken": np.array([4]),
        "passes": np.array([4]),
        "drafts": np.array([[28], [4], [0]]),
    }
    for _ in range(6):
        known.learn(plan, (1, 128), out, 1.0, 32)
    assert known.plan([sample(text[:4])], 128).width == 1
    # Many slots never have some.
    assert known.width(1) == 8 and known.width(128) == 1


def test_drafts_that_are_slower_end():
    text = list(range(50, 90))
    known = drafts.Drafts()
    known.remember(sample(text))
    known.begin()
    out = {
        "taken": np.array([32]),
        "passes": np.array([4]),
        "drafts": np.array([[28], [28], [28]]),
    }
    plain, wide = drafts.Plan(), drafts.Plan(8)
    widths = []
    for _ in range(2 * drafts.CALLS_MEASURED):
        learn(known, plain, list(range(32)), seconds=32.0)
        known.learn(wide, (1, 128), out, 40.0, 32)
        widths.append(known.plan([sample()], 128).width)
    # Each of the 4 passes takes 10 seconds, one of a single token 1 second.
    # The first calls compile.
    half = drafts.CALLS_MEASURED
    assert widths == [8] * half + [1] * half
    # They are measured again now and then.
    later = [known.plan([sample()], 128).width for _ in range(32)]
    assert later.count(8) == 2


def test_all_processes_choose_by_the_times_of_the_first(monkeypatch):
    known = drafts.Drafts()
    known.remember(sample(range(50, 90)))
    known._count(10, 10)
    known._seconds[1, 1] = known._seconds[1, 8] = [1.0] * 9
    known.begin()
    assert known.plan([sample()], 128).width == 8
    shared = []

    def from_first(value):
        shared.append(json.loads(json.dumps(value)))
        return [[[1, 1], 1.0], [[1, 8], 10.0]]

    monkeypatch.setattr(drafts.processes, "count", lambda: 2)
    monkeypatch.setattr(drafts.processes, "from_first", from_first)
    known.begin()
    assert shared == [[[[1, 1], 1.0], [[1, 8], 1.0]]]
    assert known.plan([sample()], 128).width == 1
    # Its own times change nothing until the next call.
    known._time(1, 128, 8, 0.1)
    known._time(1, 128, 8, 0.1)
    assert known.plan([sample()], 128).width == 1


def test_what_is_kept_of_earlier_calls(monkeypatch):
    known = drafts.Drafts()
    for i in range(drafts.SAMPLES_KEPT + 3):
        known.remember(sample([100 + i] * 5))
    known.remember(sample([110] * 5))
    [kept] = known._known.values()
    assert [ids[-1] for ids in kept.values()][-1] == 110
    assert len(kept) == drafts.SAMPLES_KEPT
    assert known._size == sum(map(len, kept.values()))
    # What was sampled before an interruption is no part of the prompt.
    [resumed] = Samples([Request([5, 6, 100], max_tokens=9, drawn=1, seed=0)])
    assert resumed.prompt_key == sample().prompt_key
    monkeypatch.setattr(drafts, "TOKENS_KEPT", 20)
    known.remember(sample(range(10), prompt=(7,)))
    assert list(known._known) == [sample(prompt=(7,)).prompt_key]
    assert known._size == 11
