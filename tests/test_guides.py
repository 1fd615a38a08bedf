"""Each guide runs, offline and top to bottom, and its result holds."""

import ast
import functools
import json
import os
import pathlib
import random
import re
import runpy
import statistics
import subprocess
import sys

import jax
import keras
import pytest

import keras_posttrain as kpt

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = sorted((ROOT / "guides").glob("*.py"))
RECIPES = sorted((ROOT / "guides" / "recipes").glob("*.py"))
# What they gave, and where it is recorded again.
CURVES = ROOT / "guides" / "recipes" / "curves.json"
RECORD = "KERAS_POSTTRAIN_RECORD_CURVES" in os.environ
HEADER = re.compile(
    r"Title: .+\nAuthor: .+\nDate created: \d{4}/\d\d/\d\d\n"
    r"Last modified: \d{4}/\d\d/\d\d\nDescription: .+\n"
    r"Accelerator: (None|CPU|GPU|TPU)\n"
)
# Results hold from other seeds too: KERAS_POSTTRAIN_TEST_SEED=1.
SEED = int(os.environ.get("KERAS_POSTTRAIN_TEST_SEED", "0"))
# Of long guides all cells are run in CI, with few steps. What they learn is
# asserted in the full suite.
LONG = pytest.mark.parametrize(
    "is_short", [True, pytest.param(False, marks=pytest.mark.full)]
)
MODEL = ("config.json", "model.safetensors", "tokenizer.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a guide in this process, which has its imports already.

    `run(name)` returns the folder that the guide wrote, and what it printed.
    `seed` takes the place of the guide's. With `is_short`, each `fit` of a
    task of `short` ends after two steps; with `begins_early`, those of
    `SFTTask`, by which a model learns what a guide begins with, take half of
    their epochs. With `is_thin` the guide's model has one layer, for results
    that do not need two.
    """
    seed_all, seed_random = keras.utils.set_random_seed, random.seed

    def two_steps(fit):
        def fit_two(task, rows, batch_size=8, epochs=1, **kwargs):
            rows = rows[: 2 * batch_size]
            return fit(task, rows, batch_size=batch_size, **kwargs)

        return fit_two

    def half(fit):
        def fit_half(task, rows, epochs=1, **kwargs):
            return fit(task, rows, epochs=-(-epochs // 2), **kwargs)

        return fit_half

    def run_here(
        name,
        seed=SEED,
        is_short=False,
        short=(kpt.GRPOTask,),
        begins_early=False,
        is_thin=False,
    ):
        if is_thin:
            make = functools.partial(kpt.examples.tiny_preset, num_layers=1)
            monkeypatch.setattr(kpt.examples, "tiny_preset", make)
        shorter = dict.fromkeys(short, two_steps) if is_short else {}
        if begins_early:
            shorter = {kpt.SFTTask: half} | shorter
        for task, shorten in shorter.items():
            monkeypatch.setattr(task, "fit", shorten(task.fit))
        monkeypatch.setattr(
            keras.utils, "set_random_seed", lambda _: seed_all(seed)
        )
        monkeypatch.setattr(random, "seed", lambda _: seed_random(seed))
        path, folder = ROOT / "guides" / f"{name}.py", tmp_path / "made"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), str(folder)])
        runpy.run_path(str(path), run_name="__main__")
        check_only_folder(tmp_path, folder)
        return folder, capsys.readouterr().out

    yield run_here
    keras.utils.clear_session()


def run_alone(name, tmp_path):
    """Runs a guide as a user does, in a process of its own."""
    folder = tmp_path / "made"
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "guides" / f"{name}.py"), str(folder)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_only_folder(tmp_path, folder)
    return folder, done.stdout


def check_only_folder(tmp_path, folder):
    """Checks that nothing is written outside the folder that was named."""
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def has_files(folder, names):
    missing = [name for name in names if not (folder / name).stat().st_size]
    return not missing


def read_log(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def passed_on(body):
    """The names in `rewards=`, `episode=`, and in calls that take functions:
    of episodes, of evaluations, and of a loss."""
    found = [
        part
        for node in body
        for part in ast.walk(node)
        if (
            isinstance(part, ast.keyword)
            and part.arg in ("rewards", "episode", "opponents")
        )
        or (
            isinstance(part, ast.Call)
            and ast.unparse(part.func).startswith(
                (
                    "kpt.callbacks.Evaluate",
                    "kpt.episodes.",
                    "kpt.evaluation.",
                    "kpt.losses.FunctionLoss",
                )
            )
        )
    ]
    return {
        name.id
        for part in found
        for name in ast.walk(part)
        if isinstance(name, ast.Name)
    }


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_is_a_tutobook(path):
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    texts = [
        node.value.value
        for node in body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    assert HEADER.fullmatch(texts[0].lstrip("\n"))
    assert len(texts) > 5
    assert "set `preset`" in " ".join(" ".join(texts).split())
    # The model comes from one call, which a reader replaces by a name.
    assert source.count("kpt.examples.tiny_preset(") >= 1
    assert "import keras_hub" not in source
    assert "import tokenizers" not in source
    # A guide that needs a helper function shows that the library lacks one.
    # Rewards, tools and opponents are functions by nature.
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    assert functions <= passed_on(body)


def test_all_guides_are_run():
    functions = {name.removeprefix("test_") for name in globals()}
    # `tests/vllm` runs one, which needs vLLM.
    functions.add("vllm_rollouts")
    assert {path.stem for path in GUIDES} <= functions


def test_the_readme_names_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    paths = links + re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_readmes_code_runs(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert max(len(block.splitlines()) for block in blocks) <= 17
    code = "\n".join(blocks)
    preset = ROOT / "tests" / "reference" / "models" / "qwen3"
    for line, replaced in (
        # The one line that a reader changes, too.
        (r"^preset = .*$", f"preset = {str(preset)!r}"),
        # Episodes of two guesses, and one step of them.
        (r"range\(9\)", "range(1)"),
        (r"range\(1, 101\)", "range(1, 3)"),
        (r"max_completion_length=64", "max_completion_length=8"),
    ):
        code, count = re.subn(line, replaced, code, flags=re.MULTILINE)
        assert count == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    keras.utils.clear_session()
    assert has_files(tmp_path / "adapter", ADAPTER)
    assert has_files(tmp_path / "model", MODEL)
    assert has_files(tmp_path / "run", ["report.html"])
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()
    completions = (tmp_path / "run" / "completions.jsonl").read_text()
    assert len(completions.splitlines()) == 8


@pytest.mark.usefixtures("optimized")
def test_quickstart(tmp_path):
    folder, _ = run_alone("quickstart", tmp_path)
    for name in ("tiny", "adder", "german_adder"):
        assert has_files(folder / name, MODEL)
    assert has_files(folder / "adapter", ADAPTER)
    assert has_files(folder, ["loss.png", "train.jsonl"])
    log = read_log(folder)
    assert log[-1]["loss"] < 0.02 * log[0]["loss"]
    results = json.loads((folder / "results.json").read_text())
    before, after = results["before"], results["after"]
    assert before["answers_right"] < 0.1 < 0.9 < after["answers_right"]
    # The reward alone: half of the answers were in German before.
    assert after["reward_before"] < 0.65 and after["reward_after"] > 0.8
    assert after["german_answers_right"] > 0.9
    assert after["perplexity"] < 1.1 < 50 < before["perplexity"]
    assert after["adapter_agrees"] and after["merged_agrees"]


def test_sft(run):
    folder, text = run("sft")
    assert has_files(folder / "merged", MODEL)
    assert has_files(folder / "adapter", ADAPTER)
    log = read_log(folder / "run")
    assert [line["step"] for line in log] == list(range(1, len(log) + 1))
    assert log[-1]["loss"] < 0.3 * log[0]["loss"]
    assert "without a gap: True" in text
    trained = re.findall(r"^trained '(.*)'$", text, re.MULTILINE)
    answers = "It is Vienna.<|im_end|>They speak German.<|im_end|>"
    assert "".join(trained) == answers
    # The task's two turns; the adapter on a fresh model; the same merged.
    answers = re.findall(r"^It is .*\.$", text, re.MULTILINE)
    assert len(answers) == 3 and answers[1] == answers[2] == "It is Athens."
    assert answers[0] == "It is Athens. They speak Greek."
    difference = re.search(r"largest difference to PEFT: (\S+)", text)
    assert float(difference[1]) < 1e-4


# Inspect leaves streams open, and calls tenacity by an old name.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:The 'initial' parameter:DeprecationWarning",
)
@LONG
def test_evaluation(run, is_short):
    every = (kpt.SFTTask,)
    folder, text = run(
        "evaluation", is_short=is_short, short=every, is_thin=is_short
    )
    assert has_files(folder, ["evaluation.png", "held_out.jsonl"])
    # Nothing is right at the start, which is no error of measurement.
    assert "'exact_match': 0.0, 'exact_match/stderr': 0.0" in text
    step = re.search(r"^best at step (\d+)$", text, re.MULTILINE)[1]
    assert (folder / "run" / "checkpoints" / step).is_dir()
    rate = re.search(r"win rate ([\d.]+), 95 % from ([\d.]+)", text)
    passed = [float(x) for x in re.findall(r"pass@\d ([\d.]+)", text)]
    assert len(passed) == 3 and passed == sorted(passed)
    assert "the three agree: True" in text
    if not is_short:
        assert float(rate[1]) > 0.8 and float(rate[2]) > 0.6
        assert passed[0] > 0.5


def test_data_formats(run):
    folder, text = run("data_formats")
    assert has_files(folder, ["sums.jsonl"])
    assert has_files(folder / "tiny", MODEL)
    # Every bad dataset was refused, with what was received.
    bad = text.split("a misspelt column:")[1]
    assert bad.count("Received: ") == 11
    assert "Did you mean 'prompt' by 'promt'?" in bad


def test_custom_train_step(run):
    folder, text = run("custom_train_step")
    assert all("sharpness" in line for line in read_log(folder / "sam"))
    assert "interrupted after step 17" in text
    straight, stopped = (
        [(line["step"], line["loss"]) for line in read_log(folder / name)]
        for name in ("straight", "stopped")
    )
    assert straight == stopped and len(straight) == 30
    last = re.search(r"loss of some epochs: .* ([\d.]+)\]", text)
    assert 0.5 <= float(last[1]) < 0.8


def test_training_loop(run):
    folder, text = run("training_loop")
    right = json.loads((folder / "results.json").read_text())["right"]
    assert right[0] < 0.35 and statistics.mean(right[-3:]) > right[0] + 0.15
    assert int(re.search(r"tokens imitated: (\d+)", text)[1]) > 0
    assert "the same after resuming: True" in text


@pytest.mark.usefixtures("optimized")
def test_sampling(run):
    _, text = run("sampling")
    before, after = re.findall(r"(\d+)% of the samples are right", text)
    assert int(before) < 60 and int(after) > 80
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 2e-5
    assert "decode of 64 slots" in text and "weights 1" in text


def check_tool_use(run, seed):
    folder, _ = run("tool_use", seed)
    results = json.loads((folder / "results.json").read_text())
    assert results["before"] < 0.4 and results["calls_before"] < 0.5
    assert results["after"] > 2 * results["before"]
    assert results["calls_after"] > 0.7


def check_black_box_agent(run, seed):
    folder, _ = run("black_box_agent", seed)
    results = json.loads((folder / "results.json").read_text())
    assert results["before"] < 0.4
    assert results["after"] > 2 * results["before"]


def check_multi_turn_game(run, seed):
    folder, _ = run("multi_turn_game", seed)
    results = json.loads((folder / "results.json").read_text())
    assert results["guess"][0] < 0.4
    assert results["guess"][1] > 2 * results["guess"][0]
    assert results["sokoban"][0] < 0.4
    assert results["sokoban"][1] > 1.6 * results["sokoban"][0]


def check_self_play(run, seed):
    folder, _ = run("self_play", seed)
    results = json.loads((folder / "results.json").read_text())
    # Against its copies the policy sees fewer of its own mistakes.
    for way, factor in (("both_seats", 1.8), ("frozen_copy", 1.5)):
        before, after = results[way]
        assert 0.15 < before < 0.4 and after > factor * before


@pytest.mark.full
@pytest.mark.parametrize("seed", [SEED, 1, 2])
@pytest.mark.parametrize(
    "check",
    [
        check_tool_use,
        check_black_box_agent,
        check_multi_turn_game,
        check_self_play,
    ],
)
def test_agents_learn(run, check, seed):
    check(run, seed)


@LONG
def test_grpo_arithmetic(run, is_short):
    folder, text = run("grpo_arithmetic", is_short=is_short, is_thin=is_short)
    assert has_files(folder, ["reward.png", "completions.jsonl"])
    results = json.loads((folder / "results.json").read_text())
    assert max(results["before"], results["before_sampled"]) <= 0.2
    # The two rewards, tried on three completions.
    assert "[1.0, 0.0, 0.0]\n[1.0, 1.0, 0.0]\n" in text
    log = read_log(folder)
    # Nothing that was trained on is evaluated.
    lines = (folder / "completions.jsonl").read_text().splitlines()
    steps = {json.loads(line)["step"] for line in lines}
    assert steps == ({0} if is_short else {0, 50})
    if not is_short:
        assert min(results["after"], results["after_sampled"]) >= 0.8
        last = statistics.mean(line["reward"] for line in log[-5:])
        assert log[0]["reward"] < 0.4 and last > 0.75


@pytest.mark.usefixtures("optimized")
def test_tool_use(run):
    folder, text = run(
        "tool_use", is_short=True, begins_early=True, is_thin=True
    )
    assert '"name": "calculator"' in text
    assert [line["step"] for line in read_log(folder)] == [1, 2]
    lines = (folder / "completions.jsonl").read_text().splitlines()
    assert any('"role": "tool"' in line for line in lines)
    results = json.loads((folder / "results.json").read_text())
    assert 0 < results["before"] < 0.4 and 0 < results["after"]


def test_black_box_agent(run):
    folder, text = run("black_box_agent", is_short=True, begins_early=True)
    results = json.loads((folder / "results.json").read_text())
    assert 0 < results["before"] < 0.4 and 0 < results["after"]
    assert [line["step"] for line in read_log(folder)] == [1, 2]
    assert "requests of an episode: 2.0" in text
    assert "of those that fork: 0.0" in text


@pytest.mark.usefixtures("optimized")
def test_multi_turn_game(run):
    folder, text = run(
        "multi_turn_game", is_short=True, begins_early=True, is_thin=True
    )
    assert "84 boards" in text
    results = json.loads((folder / "results.json").read_text())
    for game in ("guess", "sokoban"):
        before, after = results[game]
        assert 0 < before < 0.4 and 0 < after
    # All of its rows are one step.
    assert [line["step"] for line in read_log(folder / "guess")] == [1]


@pytest.mark.usefixtures("optimized")
def test_self_play(run):
    folder, text = run(
        "self_play", is_short=True, begins_early=True, is_thin=True
    )
    assert "user:\na b c\nd e f\ng h i\n" in text
    assert "--- other ---" in text
    results = json.loads((folder / "results.json").read_text())
    for way in ("both_seats", "frozen_copy"):
        before, after = results[way]
        assert 0.15 < before < 0.4 and 0 < after
        steps = [line["step"] for line in read_log(folder / way)]
        assert steps == [1, 2]


@pytest.mark.usefixtures("optimized")
def test_vision_sft(run):
    folder, text = run("vision_sft")
    assert has_files(folder / "model", MODEL)
    assert text.count("<image_soft_token>") == 4
    # A model that sees nothing has a quarter of both.
    results = json.loads((folder / "results.json").read_text())
    assert results["right"] > 0.85 and results["mirrored"] < 0.15


def test_qlora(run):
    folder, text = run("qlora")
    results = json.loads((folder / "results.json").read_text())
    floats = results["floats"]
    for kind, share, difference in (
        ("int8", 0.28, 0.02),
        ("int4", 0.16, 0.3),
        ("nf4", 0.16, 0.3),
    ):
        found = results[kind]
        assert found["bytes"] < share * floats["bytes"]
        assert 0 < found["difference"] < difference
        assert found["loss"] == pytest.approx(floats["loss"], rel=0.1)
    assert results["export"]["gap"] < 1e-4
    divergence = results["distilled"]
    assert divergence["after"] < 0.3 * divergence["before"]
    assert has_files(folder / "export", MODEL)
    assert has_files(folder / "adapter", ADAPTER)


@LONG
def test_dpo(run, is_short):
    every = kpt.SFTTask, kpt.DPOTask, kpt.GRPOTask
    folder, text = run("dpo", is_short=is_short, short=every, is_thin=is_short)
    assert has_files(folder, ["preference.png"])
    results = json.loads((folder / "results.json").read_text())
    log = read_log(folder)
    assert log[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    # The prompt once, no padding, no reference: and the same loss.
    costs = re.findall(r": (\d+) tokens a step, held-out loss (\S+)", text)
    (apart, first), (shared, second) = costs
    assert int(shared) < 0.65 * int(apart)
    assert float(first) == pytest.approx(float(second), abs=2e-5)
    assert has_files(folder / "adapter", ADAPTER)
    if not is_short:
        check_preferences(results, text)


def check_preferences(results, text):
    assert results["before"] < 0.65
    assert results["after"] > results["before"] + 0.2
    assert results["accuracy"] > 0.95
    margins = results["margins"]
    assert margins == sorted(margins) and margins[-1] > 4 * margins[0] > 0
    chosen = results["logps_chosen"]
    assert chosen[0] < -0.5 and chosen[1] > chosen[0] + 0.1
    for way in ("SimPO", "SFT, DPO and GRPO"):
        right = re.search(rf"by {way}: (\d+)% -> (\d+)%", text)
        assert int(right[2]) > int(right[1]) + 15


@pytest.mark.usefixtures("optimized")
@LONG
def test_reward_model(run, is_short):
    some = kpt.RewardTask, kpt.GRPOTask
    folder, text = run(
        "reward_model",
        is_short=is_short,
        short=some,
        begins_early=is_short,
        is_thin=is_short,
    )
    assert has_files(folder, ["rewards.png", "completions.jsonl"])
    assert has_files(folder / "reward_model", MODEL[:2])
    results = json.loads((folder / "results.json").read_text())
    # Right, not an answer, wrong by one: as the reward model has them.
    scores = [
        float(x) for x in re.findall(r"fruit\? .*: (-?[\d.]+)$", text, re.M)
    ]
    assert len(scores) == 3
    if not is_short:
        assert results["reward_model_accuracy"] > 0.85
        first, last = results["scores"]
        assert last > first + 2
        assert results["after"] > results["before"] + 0.15
        assert scores[0] > max(scores[1:])
    # The true answer is logged and does not change the reward.
    lines = (folder / "completions.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["reward"] == pytest.approx(line["model"])
        assert line["right"] in (0, 1)


# The rows of GSM8K have these two columns and this end, and commas in some
# numbers.
GSM8K_ROWS = [
    {
        "question": "A pen costs $2. What do 700 pens cost?",
        "answer": "700 * 2 = <<700*2=1400>>1400\n#### 1,400",
    },
    {
        "question": "It was 2 degrees, and 5 less at night. How many?",
        "answer": "2 - 5 = <<2-5=-3>>-3 degrees.\n#### -3",
    },
]


def user_code():
    """The statements of the GSM8K guide that a user of it writes."""
    source = (ROOT / "guides" / "grpo_gsm8k.py").read_text(encoding="utf-8")
    is_shown = {"tiny_rows", "made_up", "answers", "lines", "names", "vote"}
    kept, begun = [], False
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            begun |= "preset" in names and "rows" in names
            is_user = begun or "instruction" in ast.unparse(node.targets)
            if is_user and not is_shown & names:
                kept.append(node)
        elif begun and ast.unparse(node).startswith("task.compile"):
            kept.append(node)
        elif begun and ast.unparse(node).startswith("task.fit"):
            kept.append(node)
            return source, kept
    raise AssertionError("The guide has no run.")


def test_gsm8k_is_at_most_twenty_lines():
    _, nodes = user_code()
    lines = sum(node.end_lineno - node.lineno + 1 for node in nodes)
    imports = 1
    assert 10 < lines + imports <= 20


def test_gsm8ks_data_and_rewards():
    """On rows of GSM8K's shape, as the `datasets` package gives them."""
    import datasets

    import keras_posttrain as kpt

    source, nodes = user_code()
    found = {"rows": datasets.Dataset.from_list(GSM8K_ROWS), "kpt": kpt}
    for node in nodes:
        names = ast.unparse(getattr(node, "targets", []) or node)
        if names in ("instruction", "correct", "ends_well", "prompts"):
            exec(ast.get_source_segment(source, node), found)
    assert len(found["prompts"]) == 2
    for row, prompt in zip(GSM8K_ROWS, found["prompts"]):
        (message,) = prompt["prompt"]
        assert message["role"] == "user"
        assert message["content"].startswith(row["question"])
        assert prompt["answer"] == row["answer"]
    pairs = [
        ("So it is 1400.\n#### 1400", 0, 1.0, 1.0),
        ("#### $1,400.00", 0, 1.0, 0.0),
        ("#### 140", 0, 0.0, 1.0),
        ("It is 1400", 0, 0.0, 0.0),
        ("#### -3", 1, 1.0, 1.0),
        ("-3 is #### 3", 1, 0.0, 1.0),
    ]
    completions, rows, correct, ends = map(list, zip(*pairs))
    arguments = {
        "completions": [
            [{"role": "assistant", "content": c}] for c in completions
        ],
        "answer": [GSM8K_ROWS[row]["answer"] for row in rows],
    }
    assert found["correct"](**arguments) == correct
    assert found["ends_well"](**arguments) == ends


def test_grpo_gsm8k(run):
    folder, text = run("grpo_gsm8k")
    assert "correct [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]" in text
    assert "ends_well [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]" in text
    assert has_files(folder / "adapter", ADAPTER)
    log = read_log(folder / "run")
    assert [line["step"] for line in log] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in log)
    lines = (folder / "run" / "completions.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    assert len(lines) == 2 * 8 * 8
    for line in lines:
        weighted = line["numeric"] + 0.1 * line["regex"]
        assert line["reward"] == pytest.approx(weighted)
    assert any(line["regex"] for line in lines)
    scores = re.search(r"\{'pass@1': (\S+), 'pass@4': (\S+), 'maj@4': ", text)
    assert 0 <= float(scores[1]) <= float(scores[2]) <= 1


@LONG
def test_write_your_own_loss(run, is_short):
    every = kpt.SFTTask, kpt.GRPOTask
    folder, text = run(
        "write_your_own_loss", is_short=is_short, short=every, is_thin=is_short
    )
    assert "by the class 0.500000" in text
    assert "SPOLoss on-policy 0.000000 0.0" in text
    slopes = "[[0.0, -0.25, -0.25], [0.0, 0.25, 0.25]]"
    assert f"its slopes {slopes}" in text
    assert float(re.search(r"at the best ratios (\S+)", text)[1]) < 1e-6
    assert "what is masked does not matter: True" in text
    shares = re.findall(r"Loss: right answers .* of (\d+)%", text)
    right = re.search(r"held-out samples right: (\d+)% -> (\d+)%", text)
    assert len(shares) == 2 and right
    if not is_short:
        assert int(shares[0]) < 75 and int(shares[1]) > int(shares[0]) + 3
        assert int(right[2]) > int(right[1]) + 15
        assert float(re.search(r"ratio_distance (\S+)", text)[1]) > 0


def test_tpu_pods(run, eight_devices, monkeypatch):
    # The guide simulates eight devices by it, which this process has already.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    # A user's setting: with exact products attention's kernel steps aside.
    with jax.default_matmul_precision(None):
        folder, printed = run("tpu_pods")
    assert "total / ideal" in printed and "tokens per second" in printed
    assert has_files(folder / "model", MODEL)
    results = json.loads((folder / "results.json").read_text())
    assert results["fits"] and 2 < results["needed_gib"] < 8
    # 100 rows by 20 are 5 steps an epoch, over both meshes.
    assert results["step"] == 300
    assert results["right"] > 0.9
    # One epoch of four rollouts; the first has the newest weights.
    assert "that sampled, in rollouts: [0.75]" in printed


@LONG
def test_distillation(run, is_short):
    every = kpt.SFTTask, kpt.DistillTask
    folder, text = run(
        "distillation", is_short=is_short, short=every, is_thin=is_short
    )
    assert has_files(folder, ["students.png"])
    assert has_files(folder / "teacher", MODEL)
    assert any((folder / "teacher_cache").iterdir())
    results = json.loads((folder / "results.json").read_text())
    alone, given, own = results.values()
    curves = [
        json.loads(re.search(rf"{name}: (\[.+\])", text)[1])
        for name in ("cached", "policy loss")
    ]
    if is_short:
        return
    assert given["arrives"] > alone["arrives"] + 0.1
    assert own["arrives"] > given["arrives"]
    assert given["agreement"] > alone["agreement"] + 0.1
    assert own["agreement"] > alone["agreement"] + 0.1
    assert own["divergence"] < 0.5 * given["divergence"]
    # Short runs have begun to learn.
    for values in curves:
        assert sum(values[-2:]) / 2 < 0.9 * values[0]


@pytest.mark.usefixtures("optimized")
def test_prompt_distillation(run):
    folder, text = run("prompt_distillation")
    assert has_files(folder / "adapter", ADAPTER)
    results = json.loads((folder / "results.json").read_text())
    assert results["before"] == 0 and results["after"] >= 0.8
    assert results["right"] >= 0.8
    shorter, longer = results["tokens"]
    assert shorter < 0.5 * longer
    first, last = re.search(r"divergence: (\S+) -> (\S+)", text).groups()
    assert float(last) < 0.1 * float(first)


# By recipe the metric of its curve and, where it has several runs, the last.
RUNS = {
    "chat_sft": ("loss", "."),
    "code_rl": ("reward", "."),
    "math_rl": ("reward", "."),
    "on_policy_distillation": ("divergence", "."),
    "prompt_distillation": ("divergence", "."),
    "rlhf": ("rewards/exact_match/mean", "rl"),
    "self_play": ("reward", "."),
    "tool_use": ("reward", "."),
}
TASKS = kpt.SFTTask, kpt.RewardTask, kpt.GRPOTask, kpt.DistillTask


def curve(log, metric, points=10):
    """Returns the last steps of parts of a log, and their means."""
    size = -(-len(log) // points)
    parts = [log[i : i + size] for i in range(0, len(log), size)]
    return {
        "metric": metric,
        "steps": [part[-1]["step"] for part in parts],
        "values": [
            round(statistics.mean(line[metric] for line in part), 3)
            for part in parts
        ],
    }


def test_the_recipes_numbers_are_those_recorded():
    readme = (CURVES.parent / "README.md").read_text(encoding="utf-8")
    recorded = json.loads(CURVES.read_text(encoding="utf-8"))
    assert recorded.keys() == RUNS.keys() == {p.stem for p in RECIPES}
    for name, found in recorded.items():
        first, last = found["values"][0], found["values"][-1]
        scores = f"{found['before']:.0%} to {found['after']:.0%}"
        curve = f"`{found['metric']}` {first:.2f} to {last:.2f}"
        steps = found["steps"][-1]
        assert f"| {name} | {scores} | {curve} | {steps} |" in readme
    links = re.findall(r"\]\((?!http)([^)]+)\)", readme)
    assert [x for x in links if not (CURVES.parent / x).exists()] == []
    for path in RECIPES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 120, path.name


@LONG
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe(run, path, is_short):
    metric, last = RUNS[path.stem]
    folder, _ = run(
        f"recipes/{path.stem}",
        is_short=is_short,
        short=TASKS,
        is_thin=is_short,
    )
    log = read_log(folder / last)
    scores = json.loads((folder / "results.json").read_text())
    assert has_files(folder / last, ["report.html"])
    kept = folder / ("rl/model" if path.stem == "rlhf" else "adapter")
    assert has_files(kept, MODEL if path.stem == "rlhf" else ADAPTER)
    assert (folder / last / "checkpoints").is_dir()
    if is_short:
        assert len(log) in (1, 2) and 0 <= scores["before"] <= 1
        return
    found = scores | curve(log, metric)
    recorded = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    if RECORD:
        text = json.dumps(recorded | {path.stem: found}, sort_keys=True)
        CURVES.write_text(text.replace('}, "', '},\n"') + "\n")
        return
    want = recorded[path.stem]
    assert found["steps"] == want["steps"]
    assert scores["after"] > scores["before"] + 0.2
    assert scores["before"] == pytest.approx(want["before"], abs=0.15)
    assert scores["after"] == pytest.approx(want["after"], abs=0.15)
    spread = max(want["values"]) - min(want["values"])
    assert found["values"][-1] == pytest.approx(
        want["values"][-1], abs=0.25 * spread
    )


SIDES = {"chosen": " 2", "rejected": " 3"}
FILES = {
    "chat_sft": {},
    "code_rl": {},
    "math_rl": {},
    "on_policy_distillation": {"--teacher": None},
    "prompt_distillation": {"--system": "Be brief."},
    "rlhf": {"--pairs": [{"prompt": "1 + 1 =", **SIDES}] * 4},
    "self_play": {},
    "tool_use": {},
}
USER = {"role": "user", "content": "1 + 1 ="}
ROW = {"prompt": "1 + 1 =", "completion": " 2", "answer": "2"}
ROW |= {"tests": "assert f(1) == 2"}


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_a_recipe_reads_files(name, tmp_path, monkeypatch):
    """With the settings of the tiny model, which is the real one here."""
    monkeypatch.chdir(tmp_path)
    said = {"role": "assistant", "content": "2"}
    rows = [{"messages": [USER, said]} if name == "chat_sft" else ROW] * 4
    preset = kpt.examples.tiny_preset("tiny", [[USER, said], *FILES[name]])
    files = {"--data": rows, "--eval-data": rows} | FILES[name]
    if name == "self_play":
        # It makes its rows.
        files = {}
    elif name == "rlhf":
        files["--eval-pairs"] = files["--pairs"]
        del files["--eval-data"]
    arguments = ["--preset", str(preset)]
    for option, content in files.items():
        path = pathlib.Path(option[2:])
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
            path = path.with_suffix(".jsonl")
        if content is not None:
            path.write_text(content)
        arguments += [option, str(path if content else preset)]
    source = (CURVES.parent / f"{name}.py").read_text(encoding="utf-8")
    assert source.count("REAL if args.preset else TINY") == 1
    source = source.replace("REAL if args.preset else TINY", "TINY")
    pathlib.Path("recipe.py").write_text(source)
    monkeypatch.setattr(sys, "argv", ["recipe.py", "made", *arguments])
    runpy.run_path("recipe.py", run_name="__main__")
    assert json.loads(pathlib.Path("made/results.json").read_text())
    keras.utils.clear_session()
