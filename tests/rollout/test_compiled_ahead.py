"""What a long run compiles before it needs it, and that nothing follows."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _compiling, _spans
from keras_posttrain.data.batches.layout import BatchLayout
from keras_posttrain.data.batches.packing import padded_rows
from keras_posttrain.rollout import Request
from keras_posttrain.rollout.native import parts, prefix_groups
from keras_posttrain.rollout.rollout import Expected
from tests.support import REFERENCE

SHORT, LONG = 4, 60


def rows(count, first=2, longest=LONG):
    """Rollouts of four prompts: the first ones short, then all lengths."""
    rng = np.random.default_rng(0)
    lengths = [SHORT] * (4 * first)
    lengths += rng.integers(SHORT, longest + 1, 4 * (count - first)).tolist()
    return [{"prompt_ids": rng.integers(20, 500, n).tolist()} for n in lengths]


class Compiled(keras.callbacks.Callback):
    """Names of the programs compiled between two rollouts."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.rollouts, self.names = 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.rollouts += 1

    def listen(self, span):
        if span.name == "compile" and self.first <= self.rollouts < self.last:
            self.names.append(span.label)


def make(compile_ahead="auto", **settings):
    keras.utils.set_random_seed(0)
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=160
    )
    task.compile(
        keras.optimizers.SGD(1e-3),
        rewards=[lambda completions: [len(c) % 3.0 for c in completions]],
        rollout=kpt.rollout.NativeRollout(
            compile_ahead=compile_ahead, **settings
        ),
        num_generations=4,
        max_completion_length=60,
        # A sample ends at each token with a chance of about 1 in 16.
        stop_token_ids=list(range(8, 40)),
    )
    return task


def later_programs(task, after=2, count=8, longest=LONG, callbacks=(), **fit):
    """Names of the programs compiled after so many rollouts."""
    reader = Compiled(after, count)
    _spans.listen(reader.listen)
    try:
        task.fit(
            rows(count, longest=longest),
            batch_size=4,
            shuffle=False,
            callbacks=[reader, *callbacks],
            verbose=0,
            **fit,
        )
    finally:
        _spans.unlisten(reader.listen)
    assert reader.rollouts == count
    return reader.names


def test_nothing_is_compiled_later(monkeypatch):
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 0)
    needed = later_programs(make(compile_ahead=False), longest=95)
    # `divided` is of samples that read their prompt together.
    names = "_decode", "divided", "_resize", "run"
    assert {f"jit({name})" for name in names} <= set(needed)
    assert later_programs(make(compile_ahead=True), longest=95) == []


def test_samples_that_are_continued(monkeypatch):
    """In two threads too, with half of the 16 samples each."""
    monkeypatch.setattr(parts, "num_cores", lambda: 2)
    monkeypatch.setattr(parts, "LEAST_SLOTS", 8)
    task = make(compile_ahead=True)
    assert later_programs(task, 3, max_staleness=1) == []
    slots = {x.split()[2] for x in task.rollout.programs if x[:6] == "decode"}
    assert slots == {"4", "8"}


def test_on_eight_devices(eight_devices):
    """Also the programs of prompts that are computed in pieces."""
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(4, 2)
    )
    task = make(compile_ahead=True, prefill_chunk=64)
    assert later_programs(task, longest=95) == []
    assert "extension of 4 slots by 64 tokens" in task.rollout.programs


def test_long_runs_do_and_short_runs_do_not():
    due = _compiling.is_due
    assert [n for n in range(9) if due("auto", 200, n)] == [2]
    assert not any(due("auto", 199, n) for n in range(99))
    # A stream.
    assert [n for n in range(99) if due("auto", None, n)] == [20]
    assert [n for n in range(9) if due(True, 3, n)] == [2]
    assert not any(due(False, 1000, n) for n in range(99))


def test_sizes_do_not_depend_on_what_was_sampled_before():
    """A run that resumes has the programs of one that does not."""
    task = make()
    engine, found = task.rollout, []
    engine.set_model(task)
    for first in (0, 2):
        engine.expect(Expected(3, 4, 16, (SHORT, LONG)))
        for row in rows(3)[4 * first : 4 * first + 2]:
            request = Request(row["prompt_ids"], 2, max_tokens=60)
            engine.generate([request])
            found.append(engine._sizes)
    assert len(set(found)) == 1
    assert found[0].tokens == (128, 192)
    assert found[0].slots == (16, 8)
    # No more than the engine has.
    few = kpt.rollout.NativeRollout(4)
    few.set_model(task)
    few.expect(Expected(3, 4, 16, (SHORT, LONG)))
    few.generate([Request(rows(3)[0]["prompt_ids"], max_tokens=60)])
    assert few._sizes.slots == (4,)


@pytest.mark.parametrize("budget", [None, 64])
def test_batches_of_other_shapes(budget):
    layout = BatchLayout(8, 160, token_budget=budget, max_sequences=4)
    rows = 8 if budget is None else 4
    batch = {
        "token_ids": np.ones((rows, 64), "int32"),
        "advantages": np.ones((rows, 4), "float32"),
        "routed_experts": np.ones((rows, 64, 2, 2), "int16"),
    }
    found = list(layout.other_shapes(batch, least=40))
    shapes = [x["token_ids"].shape for x in found]
    if budget is None:
        assert shapes == [(8, 128), (8, 160)]
    else:
        assert shapes == [(n, 64) for n in (2, 3, 6, 8)]
        assert {padded_rows(n, 1) for n in range(2, 9)} == {2, 3, 4, 6, 8}
    for x, (count, length) in zip(found, shapes):
        assert x["advantages"].shape == (count, 4)
        assert x["routed_experts"].shape == (count, length, 2, 2)
        assert x["routed_experts"].dtype == "int16"
