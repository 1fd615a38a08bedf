"""`python -m keras_posttrain`: its scripts, errors, help and resumed runs."""

import inspect
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import keras
import pytest
from safetensors.numpy import load_file

import keras_posttrain as kpt
from keras_posttrain import _command_line
from keras_posttrain.__main__ import main
from tests.support import REFERENCE, in_ci, one_layer, read_log

ROOT = pathlib.Path(__file__).parent.parent
MODEL = str(one_layer(REFERENCE / "models/qwen3"))
REWARDS = """
import pathlib


def correct(completions, answer):
    count = pathlib.Path("calls")
    calls = int(count.read_text()) if count.exists() else 0
    count.write_text(str(calls + 1))
    if pathlib.Path("interrupt").exists() and calls == 2:
        raise KeyboardInterrupt
    return [float(len(set(c))) for c in completions]


def broken(completions):
    raise ValueError("mine")


async def ask(chat, prompt, answer):
    # The first reply leaves tokens for the second.
    await chat(prompt, max_tokens=1)
    reply = await chat("Are you sure?", max_tokens=1)
    return float("y" in reply.text)
"""
SIDES = {"chosen": " yes it is", "rejected": " no"}
ROWS = {
    "rows.jsonl": [
        {"prompt": f"is {n} a number?", "completion": " yes it is"}
        for n in range(8)
    ],
    "prompts.jsonl": [
        {"prompt": f"is {n} a number?", "answer": "yes"} for n in range(8)
    ],
    "pairs.jsonl": [
        {"prompt": f"is {n} a number?", **SIDES} for n in range(8)
    ],
}  # fmt: skip
SAMPLED = ["--max-completion-length", "4", "--num-generations", "2"]
SCORED = ["--data", "prompts.jsonl", "--rewards", "scores.py:correct"]
RUNS = {
    "sft": ["--data", "rows.jsonl", "--packing", "--learning-rate", "1e-2"],
    "dpo": ["--data", "pairs.jsonl", "--loss", "IPOLoss(beta=0.2)"],
    "reward": ["--data", "pairs.jsonl"],
    "grpo": [*SCORED, *SAMPLED, "--loss", "DrGRPOLoss"],
    "ppo": [*SCORED, *SAMPLED, "--kl-coef", "0"],
    "distill": ["--data", "rows.jsonl", "--teacher", MODEL],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with rows and with a file of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "scores", raising=False)
    for name, rows in ROWS.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "scores.py").write_text(REWARDS)
    yield tmp_path
    sys.modules.pop("scores", None)


def command(name, out="run"):
    common = ["--preset", MODEL, "--lora", "2", "--sequence-length", "64"]
    batches = ["--batch-size", "2", "--seed", "3"]
    return [name, *common, *batches, "--out", out, *RUNS[name]]


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("name", in_ci("grpo", of=RUNS))
def test_the_script_that_is_shown_gives_the_same_weights(folder, capsys, name):
    assert main(command(name)) == 0
    shown = capsys.readouterr().out.split("\n\n")
    # What is shown is indented; the progress follows.
    lines = [
        line.removeprefix("    ")
        for part in shown
        for line in part.splitlines()
        if line.startswith("    ")
    ]
    script = "\n".join(lines).replace('"run', '"again')
    (folder / "again.py").write_text(script)
    runpy.run_path("again.py", run_name="__main__")
    assert_equal(adapter(folder / "run"), adapter(folder / "again"))
    for out in ("run", "again"):
        assert (folder / out / "report.html").stat().st_size
        assert read_log(folder / out)
    assert not (folder / "run" / "model").exists()
    # The same is printed and not run.
    assert main([*command(name, "other"), "--print-script"]) == 0
    printed = capsys.readouterr().out
    # What precedes it is the progress of the run above.
    printed = "\n".join(line for line in printed.splitlines() if line)
    assert printed.endswith(script.replace('"again', '"other'))
    assert not (folder / "other").exists()


def test_an_episode_is_scored_by_a_reward_model_on_quantized_weights(folder):
    assert main([*command("reward", "scorer"), "--export"]) == 0
    arguments = ["grpo", *command("sft")[1:-5], "--data", "prompts.jsonl"]
    arguments += ["--reward-model", "scorer/model", "--quantize", "int8"]
    arguments += ["--episode", "scores.py:ask", *SAMPLED]
    assert main([*arguments, "--rollout", "NativeRollout(num_slots=4)"]) == 0
    log = read_log(folder / "run")
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    for line in log:
        parts = line["rewards/model/mean"] + line["rewards/ask/mean"]
        assert line["reward"] == pytest.approx(parts, abs=1e-5)
    lines = (folder / "run" / "completions.jsonl").read_text().splitlines()
    messages = json.loads(lines[0])["completion"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert adapter(folder / "run")


def test_the_samples_of_distillation_are_logged(folder):
    arguments = ["distill", *command("sft")[1:-5], "--data", "prompts.jsonl"]
    assert main([*arguments, "--on-policy", *SAMPLED[:2]]) == 0
    lines = (folder / "run" / "completions.jsonl").read_text().splitlines()
    prompts = {row["prompt"] for row in ROWS["prompts.jsonl"]}
    assert {json.loads(line)["prompt"] for line in lines} == prompts


def test_a_distribution_is_set(folder, eight_devices):
    rows = ["--batch-size", "8", "--distribution", "fsdp"]
    assert main([*command("sft"), *rows]) == 0
    found = keras.distribution.distribution()
    assert found.device_mesh.devices.size == len(eight_devices)
    assert [line["step"] for line in read_log(folder / "run")] == [1]
    assert adapter(folder / "run")


def test_an_interrupted_command_goes_on(folder, capsys):
    arguments = [*command("grpo"), "--checkpoint-every", "1", "--export"]
    (folder / "interrupt").touch()
    assert main(arguments) == 130
    assert "The same command resumes" in capsys.readouterr().out
    assert not (folder / "run" / "adapter").exists()
    (folder / "interrupt").unlink()
    assert main(arguments) == 0
    assert [line["step"] for line in read_log(folder / "run")] == [1, 2, 3, 4]
    assert main(command("grpo", "straight")) == 0
    assert_equal(adapter(folder / "run"), adapter(folder / "straight"))
    # Four rollouts, of which one was interrupted, and four.
    assert (folder / "calls").read_text() == "9"
    # A run that is finished trains nothing, and writes its files again.
    assert main(arguments) == 0
    assert (folder / "calls").read_text() == "9"
    assert (folder / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    "name, option, python",
    [
        ("sft", ["--lora", "x"], lambda: kpt.LoRA(rank="x")),
        (
            "sft",
            ["--sequence-length", "1"],
            lambda: kpt.SFTTask.from_preset(MODEL, sequence_length=1),
        ),
        (
            "sft",
            ["--dtype", "float8"],
            lambda: kpt.SFTTask.from_preset(MODEL, dtype="float8"),
        ),
        (
            "dpo",
            ["--loss", "DPOLoss(beta=-1)"],
            lambda: kpt.losses.DPOLoss(beta=-1),
        ),
        ("sft", ["--batch-size", "all"], {"batch_size": "all"}),
        ("sft", ["--epochs", "0"], {"epochs": 0}),
        ("sft", ["--seed", "-1"], {"seed": -1}),
        ("sft", ["--data", "none.jsonl"], {"dataset": "none.jsonl"}),
    ],
)
def test_a_bad_value_is_answered_as_in_python(
    folder, capsys, name, option, python
):
    if isinstance(python, dict):
        task = kpt.SFTTask.from_preset(MODEL)
        task.compile()
        with pytest.raises(ValueError) as error:
            task.fit(**{"dataset": "rows.jsonl"} | python)
    else:
        with pytest.raises(ValueError) as error:
            python()
    assert main([*command(name), *option]) == 2
    found = capsys.readouterr().err
    assert found == f"error: {error.value}\n"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["stf"], "There is no command 'stf'. Did you mean 'sft'?"),
        (["sft", "--learnig-rate", "1"], "Did you mean '--learning-rate'?"),
        (["sft", "--prese", MODEL], "are required: --preset"),
        (["sft", "--lora"], "--lora: expected one argument"),
        (["sft", "--loss", "sft"], "Did you mean 'SFTLoss'?"),
        (["sft", "--loss", "SFTLoss(a=print)"], "a name of `kpt.losses`"),
        (["dpo", "--loss", "DPOLoss(bta=1)"], "unexpected keyword argument"),
        (["sft", "--distribution", "fsdp2"], "Did you mean 'fsdp'?"),
        (["sft", "--report", "maybe"], "`--report` must be yes or no"),
        (["grpo", "--rewards", "scores"], "names no module"),
        (["grpo", "--rewards", "nowhere:f"], "no module 'nowhere'"),
        (["grpo", "--rewards", "nowhere.py"], "no file 'nowhere.py'"),
        (["grpo", "--rewards", "scores.py"], "['correct', 'broken', 'ask']"),
        (["grpo", "--rewards", "scores:corect"], "Did you mean 'correct'?"),
        (["grpo", "--rewards", "Mathreward"], "Did you mean 'MathReward'?"),
        (["grpo", "--episode", "play"], "names no module"),
        (["grpo", "--rewards", "RegexReward"], "argument: 'pattern'"),
    ],
)
def test_a_bad_argument_is_answered(folder, capsys, arguments, expected):
    name, *rest = arguments
    if name in RUNS and "--prese" not in rest:
        arguments = [*command(name), *rest]
    assert main(arguments) == 2
    found = capsys.readouterr().err
    assert found.startswith("error: ") and expected in found
    assert found.count("\n") == 1
    assert not (folder / "run").exists()


def test_an_error_of_a_reward_is_shown_where_it_is(folder):
    arguments = [*command("grpo"), "--rewards", "scores.py:broken"]
    with pytest.raises(ValueError, match="'broken' raised ValueError: mine"):
        main(arguments)


def test_help_fits_a_screen(capsys):
    for arguments in ([], *([name] for name in RUNS)):
        try:
            assert main([*arguments, "--help"]) == 0
        except SystemExit as end:
            assert not end.code
        lines = capsys.readouterr().out.splitlines()
        # One line is that of the prompt.
        assert 10 < len(lines) <= 23 and max(map(len, lines)) < 80
        if arguments:
            command = _command_line.COMMANDS[arguments[0]]
            text = " ".join(lines)
            assert all(f"--{o.name}" in text for o in command.options)


@pytest.mark.parametrize("name", RUNS)
def test_every_option_is_an_argument_of_the_python_call(folder, name):
    command = _command_line.COMMANDS[name]
    task = getattr(kpt, command.task)
    of = {"task": {}, "compile": {}, "fit": {}}
    methods = {"from_preset": "task", "__init__": "task"}
    methods |= {"compile": "compile", "fit": "fit"}
    for cls in task.__mro__:
        if cls.__module__.startswith("keras_posttrain"):
            for method in methods.keys() & vars(cls).keys():
                found = inspect.signature(getattr(cls, method)).parameters
                of[methods[method]] |= found
    replaced = {
        "learning_rate": "optimizer", "eval_data": "validation_data",
        "data": "dataset", "reward_model": "rewards",
    }  # fmt: skip
    values = {"loss": "SFTLoss", "rewards": "MathReward"}
    values |= {"episode": "scores.py:correct", "report": "no"}
    values |= {"distribution": "hybrid(slices=2)", "rollout": "NativeRollout"}
    given = {}
    for option in command.options:
        argument = option.name.replace("-", "_")
        argument = replaced.get(argument, argument)
        assert not option.place or argument in of[option.place], option.name
        value = True if option.kind == "flag" else values.get(option.name, "1")
        given[option.name] = [value] if option.many else value
    script = _command_line.script(command, given)
    compile(script, "script", "exec")
    assert all(len(line) < 80 for line in script.splitlines())
    for option in command.options:
        argument = option.name.replace("-", "_")
        if option.place in ("compile", "fit") and option.name != "data":
            assert f"{replaced.get(argument, argument)}=" in script


def test_functions_with_one_name_are_both_imported(folder):
    (folder / "other.py").write_text("def correct(completions):\n    pass\n")
    (folder / "task.py").write_text("def task(completions):\n    pass\n")
    command = _command_line.COMMANDS["grpo"]
    names = ["scores:correct", "other.py", "task.py"]
    given = {"preset": "p", "data": ["d"], "out": "o", "rewards": names}
    script = _command_line.script(command, given)
    assert "from other import correct as correct_2" in script
    assert "from task import task as task_2" in script
    assert "rewards=[correct, correct_2, task_2]" in script
    # A script finds the files from anywhere.
    assert script.count("sys.path.insert") == 1


def test_it_tells_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"keras_posttrain {kpt.__version__}\n"


def test_it_is_run_by_its_name(folder):
    done = subprocess.run(
        [sys.executable, "-m", "keras_posttrain"]
        + [*command("sft"), "--lora", "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search("^error: `rank` must be a positive", done.stderr, re.M)
    assert "kpt.LoRA(rank=0)" in done.stdout
