"""What `task.suggest` makes of a dataset, a model and a memory."""

import dataclasses

import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.packing import pack
from tests.support import random_rows
from tests.tasks import contract

# Values derived by hand are of a model of two layers.
MODEL = contract.TWO_LAYERS[0]


def sft(lora=None, length=64):
    return kpt.SFTTask.from_preset(MODEL, lora=lora, sequence_length=length)


def rows_of(lengths):
    return [
        {"token_ids": [5] * n, "completion_mask": [1] * n} for n in lengths
    ]


@pytest.fixture(scope="module")
def task():
    return sft()


@pytest.mark.parametrize("name", list(contract.TASKS))
def test_what_is_suggested_trains(name):
    """In every task, passed on as it is."""
    case = contract.TASKS[name]
    task = case.kind.from_preset(
        case.preset,
        sequence_length=64,
        lora=kpt.LoRA(rank=4),
        **case.given,
    )
    compiled = dict(case.compiled)
    if "rewards" in compiled:
        task.tokenizer = None
    if name in ("kto", "distill_on_policy"):
        # Their rows are those of a loss and of a way to train.
        task.compile(**compiled)
    s = task.suggest(case.rows)
    assert s.task["sequence_length"] <= 64 or "rewards" in compiled
    compiled = {k: v for k, v in compiled.items() if k not in s.compile}
    task.compile(**compiled, **s.compile)
    assert float(task.optimizer.learning_rate) == pytest.approx(
        s.learning_rate
    )
    history = task.fit(case.rows, verbose=0, **s.fit)
    assert np.isfinite(history.history["loss"]).all()
    # A line each, with its reason and its source.
    title, *lines = str(s).splitlines()
    assert case.kind.__name__ in title and f"all of {len(case.rows)}" in title
    assert len(lines) == len(s.settings) == len(s.reasons)
    for line, setting in zip(lines, s.settings):
        assert setting.name in line and line.endswith(f"[{setting.source}]")
        assert setting.reason and setting.source
    # Another optimizer each time: one belongs to one task.
    assert s.compile["optimizer"] is not s.compile["optimizer"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.title = ""


# The learning rate


def rate(width=64, lora=None, kind="Llama"):
    backbone = getattr(keras_hub.models, f"{kind}Backbone")(
        vocabulary_size=64,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=32,
    )
    model = getattr(keras_hub.models, f"{kind}CausalLM")(backbone)
    task = kpt.SFTTask(model, lora=lora, sequence_length=16)
    s = task.suggest(rows_of([8] * 4))
    return s.learning_rate, s.reasons["learning_rate"]


def test_the_rate_is_tinkers():
    """5e-5 x (2000 / 64)^0.781, ten times that at LoRA's alpha of 32."""
    found, why = rate()
    assert found == pytest.approx(5e-5 * 31.25**0.781, rel=1e-6)
    assert "Tinker" in why and "(2000 / 64)^0.781" in why
    wide, _ = rate(128)
    assert found / wide == pytest.approx(2**0.781, rel=1e-6)
    low, why = rate(lora=kpt.LoRA(rank=16, alpha=32))
    assert low == pytest.approx(10 * found, rel=1e-6)
    assert "x 10 for LoRA" in why and "learning_rate.md" in why
    # Of a family that nobody has measured, this is said.
    other, why = rate(kind="Mistral")
    assert other == pytest.approx(5e-5 * 31.25**0.0775, rel=1e-6)
    assert "not calibrated" in why


def test_the_rate_depends_on_scale_times_rank():
    base = rate(lora=kpt.LoRA(rank=16))[0]
    for lora, factor in (
        (kpt.LoRA(rank=64), 0.5),
        (kpt.LoRA(rank=4), 2.0),
        (kpt.LoRA(rank=64, alpha=32), 1.0),
        (kpt.LoRA(rank=4, alpha=32), 1.0),
        # The scale is 8 / 2.
        (kpt.LoRA(rank=4, alpha=8, rslora=True), 2**0.5),
    ):
        assert rate(lora=lora)[0] == pytest.approx(base * factor, rel=1e-6)


@pytest.mark.parametrize(
    "kind, rates",
    [(kpt.DPOTask, (1e-5, 1e-6)), (kpt.RewardTask, (1e-4, 1e-5))],
)
def test_other_tasks_have_their_own_rates(kind, rates):
    for lora, expected in zip((kpt.LoRA(rank=16), None), rates):
        task = kind.from_preset(MODEL, lora=lora)
        s = task.suggest(contract.PAIRS)
        assert s.learning_rate == pytest.approx(expected)
        assert "our default" in s.reasons["learning_rate"]


# The data


def test_the_length_is_a_quantile(task):
    s = task.suggest(rows_of([100] * 995 + [1000] * 5))
    assert s.task["sequence_length"] == 112
    assert s.task["truncation"] == "drop"
    assert "5 of 1,000 sequences" in s.reasons["truncation"]
    # A few rows have no outliers; nothing of them is left out.
    s = task.suggest(rows_of([100] * 20 + [200]))
    assert s.task["sequence_length"] == 256 and "truncation" not in s.task
    assert "longest 200" in s.reasons["sequence_length"]


def test_packing_follows_from_the_fill(task):
    s = task.suggest(rows_of([60] * 64))
    assert s.fit["packing"] is False
    assert "are 100% full" in s.reasons["packing"]
    lengths = [10] * 56 + [120] * 8
    s = task.suggest(rows_of(lengths))
    assert s.fit["packing"] is True
    # A step still has about as many rows: eight, in packed rows.
    packed = pack(lengths, s.task["sequence_length"])
    each = len(lengths) / len(packed)
    assert abs(s.fit["batch_size"] * each - 8) <= each
    assert "packed rows hold about 8 rows" in s.reasons["batch_size"]
    # Pairs are counted as they are.
    pairs = [
        {"chosen_ids": [5] * n, "rejected_ids": [6] * n, "prompt_ids": [7]}
        for n in lengths
    ]
    dpo = kpt.DPOTask.from_preset(MODEL, sequence_length=128)
    s = dpo.suggest(pairs)
    assert s.fit == {"batch_size": 8, "packing": True}


@pytest.mark.parametrize(
    "count, lora, size",
    [(3, None, 3), (50, None, 8), (1700, None, 16), (9999, None, 64)]
    + [(9999, kpt.LoRA(rank=2), 32), (20000, None, 128)],
)
def test_the_batch_leaves_steps(task, count, lora, size):
    task = sft(lora) if lora else task
    s = task.suggest(rows_of([8] * count))
    assert s.fit["batch_size"] == size
    wanted = "adapters lose" if lora else "128"
    assert wanted in s.reasons["batch_size"]


def test_rows_that_can_be_read_once_are_refused(task):
    rows = rows_of([8] * 12)
    with pytest.raises(ValueError, match="could not read again.*lambda"):
        task.suggest(row for row in rows)
    s = task.suggest(lambda: iter(rows))
    assert "the first of 12 rows" in s.title


def test_completions_of_prompts():
    """Their length is taken from rows that have some, and else left out."""
    task = kpt.GRPOTask.from_preset(MODEL)
    prompts = [{"prompt_ids": [5] * 10} for _ in range(800)]
    s = task.suggest(prompts)
    assert s.task["sequence_length"] == 320
    assert "max_completion_length" not in s.compile
    assert s.compile["num_generations"] == 16
    assert s.fit == {"batch_size": 16}
    assert "TRL" in s.reasons["learning_rate"] or task.adapter is None
    answered = [{**p, "completion_ids": [6] * 30} for p in prompts]
    s = task.suggest(answered)
    # Half more than 30, in steps of 16.
    assert s.compile["max_completion_length"] == 48
    assert s.task["sequence_length"] == 64
    # PPO compares no samples of one prompt.
    ppo = kpt.PPOTask.from_preset(MODEL)
    assert "num_generations" not in ppo.suggest(prompts).compile


# The memory


def test_less_memory_makes_smaller_micro_batches(task):
    rows = rows_of([500] * 3000)
    sizes, remats = [], []
    for megabytes in (1024, 64, 32, 20, 14, 7):
        s = task.suggest(rows, memory=megabytes * 2**20)
        sizes.append(s.compile["micro_batch_size"])
        remats.append(s.task["remat"])
    assert sizes[0] is None and remats[0] == "none"
    known = [16 if x is None else x for x in sizes]
    full = remats.index("full")
    assert known[:full] == sorted(known[:full], reverse=True)
    assert known[full:] == sorted(known[full:], reverse=True)
    assert len(set(known)) >= 4 and set(remats[full:]) == {"full"}
    assert "too little for one row" in s.reasons["micro_batch_size"]
    assert "task.plan" in s.reasons["micro_batch_size"]
    # An adapter has hardly an optimizer.
    low = sft(kpt.LoRA(rank=2)).suggest(rows, memory=14 * 2**20)
    assert low.compile["micro_batch_size"] >= (known[4])


def test_the_estimate_is_near_the_compilers():
    """Of activations, on a CPU: within a factor of three."""
    task = sft(length=256)
    task.compile()
    temporaries = [
        task.plan("cpu:1", batch_size=n).measured.numbers["set aside"]
        for n in (4, 8)
    ]
    each = (temporaries[1] - temporaries[0]) / 4
    reason = task.suggest(rows_of([256] * 400)).reasons["micro_batch_size"]
    guess, unit = reason.split("optimizer, ")[1].split()[:2]
    guess = float(guess) * {"KiB": 2**10, "MiB": 2**20}[unit]
    assert 1 / 3 < guess / each < 3, (guess, each)


def test_shapes_alone_are_enough():
    with kpt.distribution.shapes_only():
        task = kpt.SFTTask.from_preset(
            MODEL, load_weights=False, dtype="bfloat16"
        )
        rows = rows_of([500] * 3000)
        small = task.suggest(rows, memory=16 * 2**20)
        large = task.suggest(rows, memory=2**30)
    assert small.task["remat"] == "full" and large.task["remat"] == "none"
    assert large.compile["micro_batch_size"] is None


@pytest.mark.parametrize("memory", ["24 GB", 0, -1, True, float("inf")])
def test_a_memory_that_is_none(task, memory):
    with pytest.raises(ValueError, match="`memory` must be a positive"):
        task.suggest(random_rows(2), memory=memory)
