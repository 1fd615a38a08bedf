"""Streams in every task: the same updates as a list, and resumed runs."""

import dataclasses

import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches import pipeline, prompt_stream
from tests.support import random_rows
from tests.tasks import contract

pytestmark = pytest.mark.contract

NAMES = [*contract.TASKS, "distill_by_column", "distill_by_weight"]


def cases(names, quick):
    """Parameters, of which only those named `quick` run every time."""
    return [
        pytest.param(x, marks=() if x in quick else pytest.mark.full)
        for x in names
    ]


class Streamed:
    """Rows that can be counted, and read in their order alone."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


def streamed(name):
    case = contract.CASES[name]
    # A teacher's answers are kept of lists only.
    cache = {} if "distill" in name else case.cache
    return dataclasses.replace(case, rows=Streamed(case.rows), cache=cache)


@pytest.mark.parametrize("name", cases(NAMES, ["dpo", "distill_by_column"]))
def test_a_stream_gives_the_update_of_a_list(name):
    found = contract.update(streamed(name))
    plain = contract.plain_update(name)
    tolerance = contract.CASES[name].tolerance
    contract.assert_same_update(plain, found, tolerance, name)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"packing": True}, marks=pytest.mark.full),
        {"share_prefix": True, "packing": 128},
    ],
    ids=["packed", "shared"],
)
@pytest.mark.parametrize(
    "name", cases(["dpo", "kto", "reward", "grpo"], ["grpo"])
)
def test_packing_and_shared_prompts(name, way):
    """Rows have room for what a stream may yet give."""
    case, plain = streamed(name), contract.plain_update(name)
    found = contract.update(case, **way)
    contract.assert_same_update(plain, found, case.tolerance, name)


@pytest.mark.parametrize(
    "name", cases([*contract.TASKS, "distill_by_column"], ["dpo", "grpo"])
)
def test_runs_on_streams_resume_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "WINDOW", 3)
    monkeypatch.setattr(prompt_stream, "WINDOW", 3)
    monkeypatch.setitem(contract.TASKS, name, streamed(name))
    contract.check_resumed_run(name, tmp_path)


def make(kind, **kwargs):
    return kind.from_preset(contract.MODEL, sequence_length=64, **kwargs)


def test_validation_evaluation_and_log_probs():
    rows = random_rows(5, seed=4)
    task = make(kpt.SFTTask, lora=kpt.LoRA(rank=2))
    task.compile()
    expected = task.evaluate(rows, batch_size=2)
    assert task.evaluate(Streamed(rows), batch_size=2) == expected
    for one, other in zip(
        task.log_probs(row for row in rows), task.log_probs(rows), strict=True
    ):
        assert (one == other).all()
    history = task.fit(
        (row for row in rows),
        batch_size=2,
        validation_data=Streamed(rows),
        verbose=0,
    )
    assert set(history.history) >= {"loss", "val_loss"}
    assert task.step == 3


def test_prompts_of_a_stream_are_validated_and_evaluated():
    rows = contract.PROMPTS[:3]
    task = make(kpt.GRPOTask)
    task.tokenizer = None
    task.compile(**contract.SAMPLED, num_generations=2)
    expected = task.evaluate(rows)
    assert task.evaluate(Streamed(rows)) == expected
    history = task.fit(
        (row for row in rows),
        batch_size=2,
        validation_data=Streamed(rows),
        verbose=0,
    )
    assert "val_reward" in history.history
    assert task.step == 2
    # The one that was looked at before the run is counted once.
    assert task.data_report.rows == 3


def test_rollouts_ahead_of_training_take_each_prompt_once(monkeypatch):
    monkeypatch.setattr(prompt_stream, "WINDOW", 3)
    seen = []

    def record(prompts, completions):
        seen.extend(map(tuple, prompts))
        return [float(len(x)) for x in completions]

    task = make(kpt.GRPOTask)
    task.tokenizer = None
    task.compile(**contract.SAMPLED | {"rewards": [record]}, num_generations=2)
    rows = contract.PROMPTS
    task.fit(
        Streamed(rows), batch_size=2, epochs=2, max_staleness=2, verbose=0
    )
    assert task.step == 6
    asked = sorted(tuple(row["prompt_ids"]) for row in rows)
    assert sorted(seen) == sorted(asked * 4)


@pytest.mark.parametrize("kind", [kpt.SFTTask, kpt.DPOTask, kpt.GRPOTask])
def test_a_generator_is_refused_for_several_epochs(kind):
    rows = {
        kpt.SFTTask: contract.ROWS,
        kpt.DPOTask: contract.PAIRS,
        kpt.GRPOTask: contract.PROMPTS,
    }[kind]
    task = make(kind)
    more = {}
    if kind is kpt.GRPOTask:
        task.tokenizer = None
        more = contract.SAMPLED
    task.compile(**more)
    with pytest.raises(ValueError, match="read only once.*epochs=2.*gener"):
        task.fit((row for row in rows), epochs=2)
    if kind is not kpt.GRPOTask:
        with pytest.raises(ValueError, match="`validation_data` can be read"):
            held_out = (row for row in rows)
            task.fit(rows, epochs=2, validation_data=held_out, verbose=0)
    assert task.step == 0


def test_errors_of_streams():
    prompted = {"chosen_ids": [5, 6], "rejected_ids": [7, 8]}
    task = make(kpt.RewardTask)
    task.compile()
    with pytest.raises(ValueError, match="a prompt in common.*in row 0"):
        task.fit(Streamed([prompted]), share_prefix=True, verbose=0)
    with pytest.raises(ValueError, match="packing=64, and a pair of 128"):
        task.fit(Streamed(contract.PAIRS), packing=64, verbose=0)
    task = make(kpt.GRPOTask)
    task.tokenizer = None

    def exact(completions, answer):
        return [1.0] * len(completions)

    task.compile(**contract.SAMPLED | {"rewards": [exact]}, num_generations=2)
    with pytest.raises(ValueError, match="needs the column 'answer'"):
        task.fit(iter(contract.PROMPTS), verbose=0)
    with pytest.raises(ValueError, match="a stream with none"):
        task.fit(iter([]), verbose=0)
