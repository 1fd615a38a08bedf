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
# As many tokens as 1 million operations or bytes each allow: 1500, and 1000.
OPTIONS = types.SimpleNamespace(
    passes=2,
    commit="abc",
    limits=[{"operations_per_s": 1.5e9, "bytes_per_s": 1e9}],
)


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
def flops(folder):
    return load("flops")


def tiny(workloads):
    return workloads.Model(
        10, layers=1, hidden=4, heads=2, kv_heads=1, intermediate=8
    )


@pytest.fixture(scope="module")
def quantized(folder):
    return load("quantized")


@pytest.fixture(scope="module")
def summary(sft):
    return sft.sft_summary


@pytest.fixture(scope="module")
def rollout_summary(rollout):
    return rollout.rollout_summary


@pytest.fixture(scope="module")
def agentic_summary(folder):
    return load("agentic").agentic_summary


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
        "operations_per_token": 1e6,
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
    text, _ = summary.markdown({k: [v] for k, v in runs.items()}, OPTIONS)
    assert text.count("| the machine's limits |  | 1500 |") == 3
    assert "| 1200 | 1200 to 1200 | 1.00x | 80% |" in text
    assert "1 measurements by `limits.py` in the same run: 2 GFLOP/s" in text


def test_operations_of_training_by_hand(flops, workloads):
    """One layer of width 4 with 2 heads, one of them with keys: 144 weights,
    and 40 in the head. A row of 3 tokens sees 1 + 2 + 3 keys, and 2 of them
    have a loss: 2 (144 x 3 + 40 x 2) + 4 x 4 x 6 = 1120 forward.

    Adapters of rank 1 have 64 weights. Weights are then used twice, and the
    first layer's queries, keys and values do not pass a gradient on:
    2240 + 96 + 6 x 64 x 3 - 2 x 4 x (4 + 4) x 3 = 3296.
    """
    model = tiny(workloads)
    assert flops.layer_weights(model) == 144
    assert flops.sft(model, [([5, 6, 7], 1)]) == 3 * 1120
    assert flops.adapter_weights(model, 1) == 64
    assert flops.sft(model, [([5, 6, 7], 1)], rank=1) == 3296
    # A prompt of one and two completions of two tokens: 5 tokens, which see
    # 1 + 2 x (2 + 3) keys, and 4 targets.
    forward = 2 * (144 * 5 + 40 * 4) + 4 * 4 * 11
    trained = 2 * forward + 4 * 4 * 11 + (6 * 64 - 2 * 4 * 8) * 5
    pair = ([5], [6, 7], [8, 9])
    assert flops.forward(model, 5, 11, 4) == forward
    assert flops.dpo(model, [pair], rank=1) == trained + forward
    assert flops.grpo(model, [1], samples=2, tokens=2, rank=1) == trained
    # All but the first of 3 tokens are targets, as in a row with a prompt of
    # one; teacher and student are of one size.
    assert flops.distill(model, model, [[5, 6, 7]]) == 4 * 1120


def test_operations_and_bytes_of_a_rollout_by_hand(flops, workloads):
    """A prompt of 2 tokens and samples of 3 and 2, of which 2 and 1 are fed
    back: 5 tokens that see 3 + 7 + 3 keys, and 4 tokens are drawn from logits.
    Two steps read 184 weights each; keys and values of a token are 4 numbers:
    those of the prompt are read twice, and those of samples 3 + 1 times.
    """
    operations, read = flops.rollout(tiny(workloads), [2], [[3, 2]])
    assert operations == 2 * (144 * 5 + 40 * 4) + 4 * 4 * 13
    assert read == 4 * (2 * 184 + 4 * (2 * 2 + 3 + 1))


def test_the_limit_is_what_takes_longest(summary):
    """10 operations at 100 a second and 4 bytes at 20: 5 tokens a second.
    The fastest of what was measured counts."""
    limits = [
        {"operations_per_s": 100, "bytes_per_s": 10},
        {"operations_per_s": 50, "bytes_per_s": 20},
    ]
    tools = summary.summary
    row = {"operations_per_token": 10, "tokens_per_s": 4}
    assert tools.limit(row, limits) == 10
    row["bytes_per_token"] = 4
    assert tools.limit(row, limits) == 5
    assert tools.reached(row, limits) == "80%"
    assert tools.limit(row, []) is None and tools.reached(row, []) == ""
    row["operations_per_token"] = None
    assert tools.limit_of([row], limits) == ""


def test_the_machine_has_limits(folder, monkeypatch):
    limits = load("limits")
    monkeypatch.setattr(limits, "SIZES", (64,))
    monkeypatch.setattr(limits, "READ", 2**16)
    assert limits.operations_per_s() > 1e6 and limits.bytes_per_s() > 1e6


def test_run_names_are_distinct_and_scripts_exist(
    sft, rollout, grpo, dpo, distill, quantized
):
    for driver, runs in (
        (quantized, quantized.all_runs()),
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


def test_ratios_of_codes_are_over_the_same_librarys_floats(quantized):
    results = {
        run: [figures(100 if run.quantize else 200) | {"weights_gb": 0.5}]
        for run in quantized.all_runs()
    }
    text, problems = quantized.markdown(results, OPTIONS)
    assert problems == []
    assert text.count("0.50x") == 8 and text.count("1.00x") == 3


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
        "operations_per_token": 1e6,
        "bytes_per_token": 1e6,
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
    # Three calls before, two passes, one and three for one token, and the
    # greedy one.
    before = [0, 1001, 1002]
    assert [seed for *_, seed in calls] == [*before, 1, 2, 0, 0, 1, 2, 0]
    assert calls[-1] == (4, 1, 32, 0.0, 0)
    assert found["new_tokens"] == [110, 110]
    assert (found["first_call_s"], found["warm_s"]) == (13, 39)
    assert found["pass_s"] == [13, 13]
    assert found["tokens_per_s"] == 110 / 13
    assert found["prefill_s"] == 3
    assert found["decode_tokens_per_s"] == (110 - 10) / (13 - 3)
    # No pass begins after 40 s, and three take 39 s.
    args.passes, calls[:] = 9, []
    generation.measure(args, sample, (), ready_s=1.5, prefill=False)
    assert [seed for *_, seed in calls] == [*before, 1, 2, 3, 4, 0]
    assert found["mean_logp"] == -1
    assert found["greedy"] == [[7] * 32] * 4
    assert (found["ready_s"], found["note"]) == (1.5, "late")


def test_rollouts_are_compared_with_the_best_setting(rollout_summary):
    """Ours 900, vLLM 300, 600 and 200: 1.5 over the second."""
    run = rollout_summary.Run
    results = {
        run("ours", "a"): [rollout_figures(900, other_cpus=0.5)],
        run("ours", "a", compiled=True): [rollout_figures(800, warm_s=66.5)],
        run("vllm", "a", 2, "auto"): [rollout_figures(300)],
        run("vllm", "a", 2, "nobind"): [
            rollout_figures(600, prefill_s=0.5, decode_tokens_per_s=700.0)
        ],
        run("vllm", "a", 1, "nobind"): [rollout_figures(200)],
        run("hf", "b"): [{"error": "Traceback\nValueError: no"}],
    }
    text, problems = rollout_summary.markdown(results, OPTIONS)
    assert "- a: new tokens/s over vLLM (2 threads, nobind): 1.50" in text
    assert text.count("new tokens/s over") == 1
    assert "| the machine's limits | 1000 |" in text
    assert all(share in text for share in ("| 90% |", "| 30% |", "| 60% |"))
    [row] = [x for x in text.splitlines() if "posttrain (in a long run)" in x]
    assert "| 66.5 |" in row
    assert problems == ["b-hf: ValueError: no"]


def test_a_ratio_says_which_of_our_runs_it_is_of(rollout_summary):
    run = rollout_summary.Run
    rows = {
        run("ours", "a"): rollout_figures(600),
        run("ours", "a", compiled=True): rollout_figures(900),
        run("vllm", "a", 1, "nobind"): rollout_figures(300),
    }
    said = "a: new tokens/s in a long run over vLLM (1 thread, nobind)"
    assert list(rollout_summary.ratios(rows)) == [(said, 3.0)]


# --- Conversations ---


def agentic_figures(rollout_s, tokens=1000):
    return {
        "rollout_s": rollout_s,
        "tokens": tokens,
        "tokens_per_s": tokens / rollout_s,
        "other_cpus": 0.0,
        "work": {"prompts": 2, "samples": 4, "turns": 4, "tokens": 8},
    }


def test_episodes_are_compared_with_their_bound(agentic_summary):
    """Sampling takes 2 s, three tools in turn 3 s, both 5.5 s: 1.1."""
    run = agentic_summary.Run
    results = {
        run("ours", 0.0): [agentic_figures(2.0)],
        run("ours", 1.0): [agentic_figures(5.5)],
        run("trl", 0.0): [agentic_figures(3.0)],
        run("trl", 1.0): [agentic_figures(55.0)],
    }
    text, problems = agentic_summary.markdown(results, OPTIONS)
    assert not problems
    for line in (
        "- an episode over sampling and one chain of tools: 1.10",
        "- TRL, over an episode, tool of 0 s: 1.50",
        "- TRL, over an episode, tool of 1 s: 10.00",
        "8 conversations of 4 turns of 8 tokens",
    ):
        assert line in text
    results[run("trl", 0.0)] = [agentic_figures(3.0, tokens=900)]
    _, problems = agentic_summary.markdown(results, OPTIONS)
    assert problems == ["The ways sampled other numbers: [900, 1000]."]


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
        "rollout_operations": 7.5e8,
        "rollout_bytes": 1e8,
        "update_operations": 7.5e8,
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
    work = grpo_steps.workloads.RLWork(prompts=1, samples=2, max_tokens=2)
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
    text, problems = grpo_summary.markdown(results, OPTIONS)
    assert problems == ["w5-long-ours: ValueError: no"]
    for line in (
        "- w5: steps per second over the faster of TRL and Tunix: 3.50",
        "- w5: steps per second over TRL: 4.50",
        "- w5: steps per second, shared prompts over separate: 1.50",
        "- w5: peak memory, shared prompts over separate: 0.75",
        "| the machine's limits | 1.00 |",
        "| keras_posttrain, prompts shared | 2.00 | 1.00x | 50% |",
    ):
        assert line in text


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
    text, problems = dpo_summary.markdown(results, OPTIONS)
    assert problems == ["ours-packed: ValueError: no"]
    for line in (
        "- tokens/s over the faster of TRL and Tunix: 2.00",
        "- tokens/s over TRL: 4.00",
        "- the highest peak memory of ours over TRL's: 0.50",
        "- the highest peak memory of ours over Tunix's: 1.00",
        "- tokens/s, prompts shared over separate: 1.33",
        "- peak memory, prompts shared over separate: 0.75",
        "| the machine's limits | 1500 |",
        "| 1200 | 1200 to 1200 | 1.00x | 80% |",
    ):
        assert line in text


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


def test_distillation_is_compared_with_both_libraries(distill_summary):
    """Ours 900, TRL 300, Tunix 600: 3 and 1.5."""
    run = distill_summary.Run
    results = {
        run("ours"): [distill_figures(900, peak_gb=2.0)],
        run("trl"): [distill_figures(300, peak_gb=5.0)],
        run("tunix"): [distill_figures(600, grad_norm=None, peak_gb=4.0)],
    }
    text, problems = distill_summary.markdown(results, OPTIONS)
    assert problems == []
    for line in (
        "- tokens/s over TRL GKD: 3.00",
        "- tokens/s over Tunix logit strategy: 1.50",
        "- peak memory over TRL GKD: 0.40",
        "| the machine's limits | 1500 |",
        "| 900 | 900 to 900 | 1.00x | 60% |",
    ):
        assert line in text


def test_the_best_learning_rate_is_that_of_a_parabola(folder):
    """In the logarithm: of losses (log2 rate - 0.25)^2 it is 2^0.25."""
    lowest = load("learning_rate").lowest
    powers = np.arange(-2.0, 3.0)
    found = lowest(list(2.0**powers), list((powers - 0.25) ** 2))
    assert found == pytest.approx(2**0.25)
    # At the end of a grid it is the end, or near it.
    found = lowest([1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    assert 2.0 <= found <= 4.0


def test_trees_hold_the_same_loss_in_all_layouts(folder):
    """Of 8 trajectories of 128 + 4 * 128 tokens, 64 of a turn sampled."""
    branches = load("branches")
    for fork, turns in (("at the last turn", 3 + 8), ("at three turns", 15)):
        rng = np.random.default_rng(0)
        groups = [branches.tree(rng, 500, branches.FORKS[fork])]
        found = {}
        for layout in branches.LAYOUTS:
            arrays, found[layout] = branches.make_batch(groups, layout)
            assert arrays["completion_mask"].sum() == 64 * turns
            assert arrays["sequence_mask"].sum() == pytest.approx(8)
        assert found == {
            "tree": 128 + 128 * turns,
            # Three rows, each with the prompt.
            "prompt": 3 * 128 + 8 * 4 * 128,
            "separate": 8 * 5 * 128,
        }


def test_steps_by_what_computes_attention(folder, monkeypatch):
    """The operations of fine-tuning the tiny model, derived by hand.

    A layer's matrices have 64 * (64 + 32 + 32 + 64 + 3 * 128) = 36,864
    weights, the head has 64 * 512; four operations for each of them and a
    token. Adapters of rank 16 have 16 * (128 + 96 + 96 + 128 + 3 * 192) =
    16,384 a layer; six operations. Of two layers these are 622,592 for a
    token, and attention of four rows of 64 tokens 12 * 64 * 2 * 4 * 64**2.
    """
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    monkeypatch.setattr(gpu, "STEPS", 1)
    figures = gpu.run("sft", "tiny", "blocks")
    assert figures["tokens"] == 256
    assert figures["flops"] == 256 * 622_592 + 12 * 64 * 2 * 4 * 64**2
    assert len(figures["losses"]) == 2 and len(figures["seconds"]) == 1
    figures |= {"seconds": [0.5], "updates": [0.5], "memory": 2**31}
    figures |= {"device": "NVIDIA H100 80GB HBM3", "flops": 989e12 / 8}
    found = {
        ("sft", "blocks"): figures,
        ("sft", "cudnn"): {"error": "no memory"},
    }
    text = gpu.table(found)
    assert f"| 512 | 2.0 | 247 | 25.0% | {figures['losses'][-1]:.4f} |" in text
    assert "| sft | cudnn | no memory |" in text
    assert gpu.differences(found) == []
    found["sft", "cudnn"] = {"losses": [1.05 * figures["losses"][-1]]}
    assert len(gpu.differences(found)) == 1


def test_peaks_of_gpus(folder):
    gpu = load("gpu")
    names = {
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L4": 121,
        "NVIDIA L40": None,
        "cpu": None,
    }
    assert {name: gpu.peak(name) for name in names} == names


@pytest.fixture(scope="module")
def step_parts(folder):
    return load("step_parts")


@pytest.mark.parametrize(
    "origin, part",
    [
        ("jit(run)/jvp(head)/while/body/dot_general", "head: products"),
        ("jit(run)/jvp(head)/while/body/exp", "head: rest"),
        (
            "jit(run)/jvp(jit(decoder_layer))/layer_0/self_attention/exp",
            "attention: rest",
        ),
        (
            "jit(run)/transpose(jvp(jit(decoder_layer)))/layer_0"
            "/self_attention/dot_general",
            "attention: products",
        ),
        (
            "jit(run)/jvp(jit(decoder_layer))/layer_0/self_attention/query"
            "/dot_general",
            "layers: products",
        ),
        (
            "jit(run)/jvp(jit(decoder_layer))/layer_0/self_attention"
            "/llama_rotary_embedding/mul",
            "layers: rest",
        ),
        ("jit(run)/adam_w/sqrt", "optimizer and others"),
    ],
)
def test_parts_of_a_step(step_parts, origin, part):
    text = f'f32[2,3] fusion(%a), metadata={{op_name="{origin}"}}'
    assert step_parts.part_of(text) == part


def test_shares_of_threads_that_compute_at_once(step_parts):
    """From 0 to 10: 4 of one part alone, then 4 in two threads, in one of
    them 1 of another part; then 1 of none, and 1 of the other part."""
    threads = [
        [(0, 8, "a"), (5, 6, "inside"), (0, 10, "not an instruction")],
        [(4, 8, "b"), (9, 10, "b"), (11, 11, "b")],
        [],
    ]
    parts = {"a": "layers", "b": "head", "inside": "head"}
    shares = step_parts.shares(threads, parts)
    assert shares == pytest.approx({"layers": 0.55, "head": 0.35})


def test_instructions_are_those_of_the_largest_program(step_parts, tmp_path):
    origin = 'metadata={op_name="jit(run)/jvp(head)/exp"}'
    big = f"ENTRY %main {{\n  %x.1 = f32[2] add(%a, %b), {origin}\n"
    big += "  ROOT %y-2 = f32[] copy(%x.1)\n}\n"
    name = "module_{}.jit_run.cpu_after_optimizations.txt"
    (tmp_path / name.format(1)).write_text(big)
    (tmp_path / name.format(2)).write_text("  %z = f32[] copy(%a)\n")
    assert step_parts.instructions(tmp_path) == {
        "x.1": "head: rest",
        "y-2": "optimizer and others",
    }


def test_the_table_of_a_step(step_parts):
    runs = [
        {
            "case": case,
            "cores": 2,
            "step_s": 2.0,
            "traced_s": 2.5,
            "shares": {part: 0.1 for part in step_parts.PARTS},
            "least": {"layers": 1e9, "attention": 2e9, "head": 3e9},
        }
        for case in step_parts.CASES
    ]
    rows = step_parts.medians(runs[:1], 10e9)
    assert rows[0] == pytest.approx(("layers: products", 0.1, 0.2, 0.1))
    assert rows[-1] == pytest.approx(("no operation", 0.3, 0.6, 0))
    text = step_parts.table(runs, [{"operations_per_s": 10e9}])
    assert "at the fastest product 0.60 s: 30%" in text
    assert "| head: products | 10% | 0.20 | 0.30 |" in text
