"""Each guide runs, offline and top to bottom, and leaves what it says."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = sorted((ROOT / "guides").glob("*.py"))
HEADER = re.compile(
    r"Title: .+\nAuthor: .+\nDate created: \d{4}/\d\d/\d\d\n"
    r"Last modified: \d{4}/\d\d/\d\d\nDescription: .+\n"
    r"Accelerator: (None|CPU|GPU|TPU)\n"
)
MODEL = ("config.json", "model.safetensors", "tokenizer.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def run(name, folder, tmp_path):
    """Runs a guide in an empty folder, and gives what it printed."""
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
    # Nothing is written but to the folder that was named.
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    return done.stdout


def has_files(folder, names):
    missing = [name for name in names if not (folder / name).stat().st_size]
    return not missing


def read_log(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


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
    # Where a guide needs a function of its own, the library lacks one.
    assert not [node for node in body if isinstance(node, ast.FunctionDef)]


def test_all_guides_are_run():
    functions = {name.removeprefix("test_") for name in globals()}
    assert {path.stem for path in GUIDES} <= functions


def test_the_readme_names_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    paths = links + re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_readmes_code_runs(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 17
    # The one line that a reader changes, too.
    preset = ROOT / "tests" / "reference" / "models" / "qwen3"
    code, count = re.subn(
        r"^preset = .*$", f"preset = {str(preset)!r}", code, flags=re.MULTILINE
    )
    assert count == 1
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert has_files(tmp_path / "adapter", ADAPTER)
    assert has_files(tmp_path / "model", MODEL)
    assert [line["step"] for line in read_log(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_quickstart(tmp_path):
    folder = tmp_path / "made"
    run("quickstart", folder, tmp_path)
    for name in ("tiny_qwen3", "adder", "german_adder"):
        assert has_files(folder / name, MODEL)
    assert has_files(folder / "adapter", ADAPTER)
    assert has_files(folder, ["loss.png", "train.jsonl"])
    log = read_log(folder)
    assert log[-1]["loss"] < 0.02 * log[0]["loss"]
    results = json.loads((folder / "results.json").read_text())
    before, after = results["before"], results["after"]
    assert before["answers_right"] < 0.1 < 0.9 < after["answers_right"]
    assert after["german_answers_right"] > 0.9
    assert after["perplexity"] < 1.1 < 50 < before["perplexity"]
    assert after["adapter_agrees"] and after["merged_agrees"]


@pytest.mark.slow
def test_sft(tmp_path):
    folder = tmp_path / "made"
    text = run("sft", folder, tmp_path)
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


@pytest.mark.slow
def test_data_formats(tmp_path):
    folder = tmp_path / "made"
    text = run("data_formats", folder, tmp_path)
    assert has_files(folder, ["sums.jsonl"])
    assert has_files(folder / "tiny_qwen3", MODEL)
    # Every bad dataset was refused, with what was received.
    bad = text.split("a misspelt column:")[1]
    assert bad.count("Received: ") == 11
    assert "Did you mean 'prompt' by 'promt'?" in bad


@pytest.mark.slow
def test_custom_train_step(tmp_path):
    folder = tmp_path / "made"
    text = run("custom_train_step", folder, tmp_path)
    assert all("sharpness" in line for line in read_log(folder / "sam"))
    assert "interrupted after step 17" in text
    straight, stopped = (
        [(line["step"], line["loss"]) for line in read_log(folder / name)]
        for name in ("straight", "stopped")
    )
    assert straight == stopped and len(straight) == 30
    last = re.search(r"loss of some epochs: .* ([\d.]+)\]", text)
    assert 0.5 <= float(last[1]) < 0.8


@pytest.mark.slow
def test_sampling(tmp_path):
    text = run("sampling", tmp_path / "made", tmp_path)
    before, after = re.findall(r"(\d+)% of the samples are right", text)
    assert int(before) < 60 and int(after) > 80
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 2e-5
    assert "decode of 64 slots" in text and "weights 1" in text
