"""The benchmark's own arithmetic; the runs themselves are `make bench`."""

import collections
import importlib.util
import pathlib
import sys
import types

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(
        f"benchmarks_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sft():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield load("sft")


@pytest.fixture(scope="module")
def summary(sft):
    return sft.summary


@pytest.fixture(scope="module")
def workloads():
    return load("workloads")


def figures(tokens_per_s, first_loss=10.0, other_cpus=0.0, peak_gb=1.0):
    return {
        "tokens_per_s": tokens_per_s,
        "step_s": 1.0,
        "first_step_s": 2.0,
        "first_loss": first_loss,
        "peak_gb": peak_gb,
        "other_cpus": other_cpus,
    }


def test_rows_are_the_same_every_time(workloads):
    """Figures of different days compare only if the rows never change."""
    rows = workloads.sft_rows("w1", 256)
    assert rows[:64] == workloads.sft_rows("w1")
    lengths = [len(ids) for ids, _ in rows]
    assert sum(lengths) == 46122
    assert sum(lengths[:64]) == 11493
    assert max(lengths) == 512
    assert rows[0][0][-1] == workloads.EOS
    prompts = sum(prompt for _, prompt in rows)
    assert prompts / sum(lengths) == pytest.approx(0.4, abs=0.01)
    with pytest.raises(ValueError, match="has 256 rows.*count=257"):
        workloads.sft_rows("w1", 257)


def test_packing_loses_nothing_and_fits(workloads):
    lengths = [len(ids) for ids, _ in workloads.sft_rows("w1", 256)]
    bins = workloads.pack(lengths, 512)
    assert sorted(i for b in bins for i in b) == list(range(256))
    assert max(sum(lengths[i] for i in b) for b in bins) <= 512
    # The least that any packing could need is ceil(46122 / 512) = 91.
    assert len(bins) == 91


def test_padding_puts_the_loss_on_the_completion(workloads):
    ids, mask, loss_mask = workloads.padded([([5, 6, 7], 1)], 4)
    np.testing.assert_array_equal(ids, [[5, 6, 7, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0]])
    np.testing.assert_array_equal(loss_mask, [[0, 1, 1, 0]])


def test_medians_leave_failures_out(summary):
    row = summary.medians(
        [figures(100, other_cpus=0.3), {"error": "x"}, figures(300)]
    )
    assert row["tokens_per_s"] == 200
    assert (row["slowest"], row["fastest"]) == (100, 300)
    assert row["other_cpus"] == 0.3
    assert row["repeats"] == 2
    assert summary.medians([{"error": "x"}]) is None


def test_first_losses_must_agree(summary):
    ours, trl = summary.Run("ours", "w1"), summary.Run("trl", "w1", lora=True)
    packed = summary.Run("ours", "w1", packing=True)
    sound = {
        ours: [figures(1, 10.4297)],
        trl: [figures(1, 10.4303)],
        packed: [figures(1, 10.41)],
    }
    assert list(summary.disagreements(sound)) == []
    wrong = {**sound, trl: [figures(1, 10.432)]}
    (line,) = summary.disagreements(wrong)
    assert "w1, padded" in line and "w1-lora-trl-padded 10.432" in line
    nan = {**sound, trl: [figures(1, float("nan"))]}
    assert len(list(summary.disagreements(nan))) == 1


def test_ratios_take_our_best_row_over_theirs(summary):
    """Ours 900 packed, 500 padded; Tunix 600; KerasHub 300: 1.5 and 3."""
    rows = {
        summary.Run("ours", "w1", packing=True): summary.medians(
            [figures(900)]
        ),
        summary.Run("ours", "w1"): summary.medians([figures(500)]),
        summary.Run("tunix", "w1", packing=True): summary.medians(
            [figures(600)]
        ),
        summary.Run("keras_hub", "w1"): summary.medians([figures(300)]),
        summary.Run("ours", "w1", lora=True): summary.medians([figures(1200)]),
        summary.Run("ours", "w2"): summary.medians(
            [figures(100, peak_gb=3.0)]
        ),
        summary.Run("trl", "w2"): summary.medians([figures(80, peak_gb=4.0)]),
    }
    found = dict(summary.ratios(rows))
    assert found["w1 full: tokens/s over the fastest other"] == 1.5
    assert found["w1 full: tokens/s over KerasHub fit"] == 3.0
    assert found["w1: our LoRA over our full"] == pytest.approx(4 / 3)
    assert found["w2 full: our peak memory over TRL's"] == 0.75
    assert not any(what.startswith("w1 lora") for what in found)


def test_the_report_names_what_failed(summary):
    options = types.SimpleNamespace(repeats=1, passes=2, commit="abc")
    text, problems = summary.markdown(
        {
            summary.Run("ours", "w1"): [figures(900, other_cpus=0.5)],
            summary.Run("tunix", "w1"): [figures(600, 10.5)],
            summary.Run("trl", "w1"): [{"error": "Traceback\nValueError: no"}],
        },
        options,
    )
    assert "| KerasHub" not in text
    assert "1.50x" in text and "0.50*" in text
    assert "- w1-full-trl-padded: ValueError: no" in text
    assert len(problems) == 2


def test_run_names_are_distinct_and_scripts_exist(sft):
    runs = list(sft.all_runs())
    counts = collections.Counter(run.name for run in runs)
    assert set(counts.values()) == {1}
    for script, _ in sft.PEERS.values():
        assert (FOLDER / script).is_file()
