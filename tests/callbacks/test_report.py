"""The page on a run: what it says, and that it never harms the run."""

import functools
import json
import pathlib
import re
import time

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _spans
from keras_posttrain.callbacks import report
from keras_posttrain.reports import page
from keras_posttrain.reports.curves import Curves
from keras_posttrain.reports.diagnoses import Diagnoses
from keras_posttrain.reports.encoding import encode, per_token
from keras_posttrain.reports.environment import command
from keras_posttrain.reports.samples import Samples
from keras_posttrain.reports.timeline import Timeline
from keras_posttrain.reports.words import BROKEN, Words
from tests.callbacks import browser
from tests.support import (
    REFERENCE,
    one_layer,
    random_rows,
    read_log,
    starts_again,
)
from tests.tasks import contract

MODEL = one_layer(REFERENCE / "models/llama3")
HOSTILE = (
    "</script><script>window.pwned=1</script>"
    '<img src=x onerror="window.pwned=1"><!--<script>'
    "{{constructor}}${window.pwned=1}\u2028\ud800'\"&lt;"
)
PROMPTS = [{"prompt_ids": r["token_ids"]} for r in random_rows(4, 4, 6)]


def read(folder):
    (run,) = page.read(pathlib.Path(folder) / "report.html")
    return run


def values(run, name):
    at = run["curves"]["names"].index(name)
    return [row[at + 2] for row in run["curves"]["rows"]]


@starts_again
def sft():
    task = kpt.SFTTask.from_preset(MODEL, sequence_length=64)
    task.compile(optimizer=keras.optimizers.SGD(1e-2))
    return task


@starts_again
def grpo():
    task = kpt.GRPOTask.from_preset(MODEL, sequence_length=64)
    task.tokenizer = None
    task.compile(
        keras.optimizers.SGD(0.1),
        rewards=[contract.odd],
        num_generations=4,
        max_completion_length=6,
        num_iterations=2,
    )
    return task


def fit_rows(*callbacks, **kwargs):
    task = sft()
    rows = random_rows(10, seed=2)
    settings = {"batch_size": 4, "verbose": 0, **kwargs}
    task.fit(rows, callbacks=list(callbacks), **settings)
    return task


def test_the_curves_are_those_of_the_log(tmp_path):
    fit_rows(
        kpt.callbacks.Report(tmp_path),
        kpt.callbacks.MetricsLog(tmp_path),
        epochs=2,
        validation_data=random_rows(4, seed=5),
    )
    run, log = read(tmp_path), read_log(tmp_path)
    assert [row[0] for row in run["curves"]["rows"]] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "learning_rate", "entropy"):
        found = [x[name] for x in log]
        np.testing.assert_allclose(values(run, name), found, rtol=1e-4)
    assert "val_loss" in run["validation"]["names"]
    assert [row[0] for row in run["validation"]["rows"]] == [3, 6]
    assert run["about"]["status"] == "finished"
    assert run["about"]["step"] == run["about"]["last"] == 6
    assert run["data"]["rows"] == 10
    assert run["environment"]["run"]["task"] == "SFTTask"
    kinds = run["memory"]["kinds"]
    size = sum(v.value.nbytes for v in sft().trainable_variables)
    assert kinds["trained weights"] == size
    totals = run["timeline"]["totals"]
    assert totals["train"][1] == 6 and totals["data"][1] >= 6
    assert totals["validation"][1] == 2


def test_rows_that_were_trained_on(tmp_path):
    rows = random_rows(4, seed=2)
    sft().fit(
        rows,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[kpt.callbacks.Report(tmp_path, num_groups=2)],
    )
    run = read(tmp_path)
    groups = run["samples"]["kept"][0]["groups"]
    assert [g["row"] for g in groups] == [0, 1]
    for group, row in zip(groups, rows):
        (segment,) = group["items"][0]["segments"]
        assert segment["ids"] == row["token_ids"]
        mask = [1000 * x for x in row["completion_mask"]]
        assert segment["mask"] == [0] + mask[1:]


def test_samples_have_what_the_run_has(tmp_path):
    """Tokens, log-probabilities and rewards equal those of the rollout."""
    seen = []

    class Keep(keras.callbacks.Callback):
        reads_step_logs = True

        def on_train_batch_end(self, batch, logs=None):
            found = self._model.run.collection
            if not seen or seen[-1] is not found:
                seen.append(found)

    grpo().fit(
        PROMPTS,
        batch_size=2,
        verbose=0,
        callbacks=[kpt.callbacks.Report(tmp_path, num_groups=5), Keep()],
    )
    run = read(tmp_path)
    assert run["samples"]["seen"] == 2
    entry, collection = run["samples"]["kept"][0], seen[0]
    assert (entry["step"], entry["of"], len(entry["groups"])) == (0, 2, 2)
    at, segment, table = 0, 0, collection.table
    for group, found in zip(collection.groups, entry["groups"]):
        first = found["items"][0]["segments"][0]["ids"]
        for trajectory, item in zip(group.trajectories, found["items"]):
            assert item["reward"] == pytest.approx(table["reward"][at], 1e-4)
            assert item["advantage"] == pytest.approx(
                table["advantage"][at], abs=1e-4
            )
            assert item["ended"] == trajectory.ended
            (part,), (own,) = item["segments"], trajectory.segments
            ids = first[: part.get("same", 0)] + part["ids"]
            assert ids == own.token_ids.tolist()
            kept = own.turns[part.get("same", 0) :] >= 0
            for name, array in (
                ("logp", own.per_token_logps),
                ("old", collection.laid_out[0].tokens(
                    "old_per_token_logps", segment)),
            ):  # fmt: skip
                shown = np.array(part[name], object)[kept].astype(float)
                assert np.abs(shown).min() > 0
                np.testing.assert_allclose(
                    shown / 1000, array[own.turns >= 0], atol=6e-4
                )
            at, segment = at + 1, segment + 1
    totals = run["timeline"]["totals"]
    for name in ("rollout", "reward", "batches", "log-probs", "train", "sync"):
        assert totals[name][1] > 0, name
    assert totals["train"][1] == 4 and totals["rollout"][1] == 2


@pytest.mark.parametrize("name", ["dpo", "distill_on_policy"])
def test_other_tasks(name, tmp_path):
    check_task(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", sorted({*contract.TASKS} - {"dpo", "distill_on_policy"})
)
def test_every_task(name, tmp_path):
    check_task(name, tmp_path)


def check_task(name, folder):
    case = contract.TASKS[name]
    task = contract.make(case, keras.optimizers.SGD(0.01))
    task.fit(
        case.rows,
        batch_size=len(case.rows),
        epochs=2,
        verbose=0,
        callbacks=[
            kpt.callbacks.Report(folder),
            kpt.callbacks.MetricsLog(folder),
        ],
    )
    run, log = read(folder), read_log(folder)
    assert "not known" not in json.dumps(run["environment"])
    for metric in log[0]:
        if metric in ("step", "num_tokens", "tokens_per_second"):
            continue
        expected = [line.get(metric) for line in log]
        for a, b in zip(values(run, metric), expected):
            assert a == (b if b is None else pytest.approx(b, 1e-4, 1e-9))
    groups = run["samples"]["kept"][0]["groups"]
    assert groups and all(g["items"] for g in groups)
    if name == "dpo":
        sides = [x["side"] for x in groups[0]["items"]]
        assert sides == ["chosen", "rejected"]
        ids = [x["segments"][0]["ids"] for x in groups[0]["items"]]
        row = case.rows[groups[0]["row"]]
        prompt = row["prompt_ids"]
        assert ids == [
            prompt + row["chosen_ids"],
            prompt + row["rejected_ids"],
        ]


def test_an_episode_with_a_tool(tmp_path):
    """Who wrote each token, the tool's time, and an error of an episode."""

    def add(a: int, b: int):
        """Adds.

        Args:
            a: a number.
            b: a number.
        """
        return a + b

    async def ask(chat, prompt):
        await chat(prompt, max_tokens=3)
        with _spans.span("tool", "add"):
            add(1, 2)
        await chat("and?", max_tokens=3)
        return 1.0

    preset = kpt.examples.tiny_preset(
        tmp_path / "tiny", [{"prompt": "ab and?", "completion": " c"}]
    )
    task = kpt.GRPOTask.from_preset(preset, sequence_length=64)
    task.compile(
        keras.optimizers.SGD(0.1),
        episode=ask,
        num_generations=2,
        max_completion_length=40,
    )
    task.fit(
        [{"prompt": "ab"}],
        verbose=0,
        batch_size=1,
        callbacks=[kpt.callbacks.Report(tmp_path)],
    )
    run = read(tmp_path)
    item = run["samples"]["kept"][0]["groups"][0]["items"][0]
    turns = item["segments"][0]["turn"]
    assert item["turns"] == 2 and {-1, 0, 1} == set(turns)
    words = run["samples"]["words"]
    text = "".join(words[str(i)] for i in item["segments"][0]["ids"])
    assert "ab" in text and "and?" in text
    assert run["timeline"]["totals"]["tool"][1] == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_how_a_run_ended(error, tmp_path):
    class Fail(keras.callbacks.Callback):
        reads_step_logs = True

        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 4:
                raise error(HOSTILE)

    with pytest.raises(error):
        fit_rows(kpt.callbacks.Report(tmp_path), Fail(), epochs=2)
    run = read(tmp_path)
    assert [row[0] for row in run["curves"]["rows"]][:3] == [1, 2, 3]
    is_asked = error is KeyboardInterrupt
    wanted = "interrupted" if is_asked else "failed"
    assert run["about"]["status"] == wanted
    assert HOSTILE in run["about"]["error"]


def test_a_resumed_run_goes_on_with_its_page(tmp_path):
    """Every step once, and none of those that were lost."""

    class Stop(keras.callbacks.Callback):
        reads_step_logs = True

        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 5:
                raise KeyboardInterrupt

    def fit(*more):
        fit_rows(
            kpt.callbacks.Report(tmp_path),
            kpt.callbacks.Checkpoint(tmp_path, every=2),
            *more,
            epochs=3,
        )

    with pytest.raises(KeyboardInterrupt):
        fit(Stop())
    before = values(read(tmp_path), "loss")
    fit()
    run = read(tmp_path)
    assert [row[0] for row in run["curves"]["rows"]] == list(range(1, 10))
    assert values(run, "loss")[:4] == before[:4]
    assert run["about"]["resumed"] == [4]
    seconds = [row[1] for row in run["curves"]["rows"]]
    assert seconds == sorted(seconds)
    # The next run begins anew, and the page of this one is kept.
    fit_rows(kpt.callbacks.Report(tmp_path), epochs=1)
    assert len(read(tmp_path)["curves"]["rows"]) == 3
    assert (tmp_path / "report.old.html").exists()


def test_it_is_written_while_the_run_lives(tmp_path):
    seen = []

    class Look(keras.callbacks.Callback):
        reads_step_logs = True

        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 3:
                time.sleep(0.5)
                seen.append(read(tmp_path))

    fit_rows(kpt.callbacks.Report(tmp_path, every=0.1), Look())
    assert seen[0]["about"]["status"] == "running"
    assert not list(tmp_path.glob("*.tmp"))


class Unruly:
    def __repr__(self):
        raise RuntimeError("no")


def test_a_report_that_fails_never_stops_a_run(tmp_path, monkeypatch):
    """A full disk, and a value of no known kind: one warning, all steps."""

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "write", full)
    report = kpt.callbacks.Report(tmp_path, every=0.01)
    with pytest.warns(UserWarning, match="the run continues") as found:
        task = fit_rows(report, epochs=3)
    # What compiles first may bring NumPy's warnings on arrays of Keras.
    own = [w for w in found if w.category is UserWarning]
    assert task.step == 9 and len(own) == 1
    monkeypatch.undo()
    monkeypatch.setattr(sft(), "preset", Unruly())
    task = fit_rows(kpt.callbacks.Report(tmp_path), epochs=1)
    assert read(tmp_path)["environment"]["run"]["preset"] == "<Unruly>"


def test_a_page_that_cannot_be_continued_is_kept(tmp_path):
    """That of another version, with a run that resumes."""
    path = tmp_path / "report.html"
    nothing = page.render(['{"curves":{"rows":[[1,0,2]]}}'])
    for text in ("<html>", nothing):
        task = sft()
        task.step = 5
        path.write_text(text)
        settings = {"batch_size": 4, "verbose": 0}
        task.fit(
            random_rows(10),
            callbacks=[kpt.callbacks.Report(tmp_path)],
            **settings,
        )
        steps = [row[0] for row in read(tmp_path)["curves"]["rows"]]
        assert steps == [6, 7, 8]
        assert (tmp_path / "report.old.html").read_text() == text


def test_it_leaves_nothing_behind(tmp_path):
    fit_rows(kpt.callbacks.Report(tmp_path))
    assert _spans._listeners == ()
    assert [x.name for x in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "given", [{"every": 0}, {"every": True}, {"num_groups": 0.5}]
)
def test_wrong_arguments(given, tmp_path):
    with pytest.raises(ValueError, match="must be a positive"):
        kpt.callbacks.Report(tmp_path, **given)


# The parts


def test_curves_are_thinned_and_keep_the_last():
    curves = Curves(most=10)
    for step in range(1, 100):
        curves.add(step, step / 10, {"x": step, "y": float("nan")})
    data = json.loads(curves.text())
    steps = [row[0] for row in data["rows"]]
    assert data["stride"] == 16 and steps == [16, 32, 48, 64, 80, 96, 99]
    assert data["rows"][0][2:] == [16, None]
    again = Curves(most=10)
    again.restore(data, 50)
    assert [row[0] for row in json.loads(again.text())["rows"]] == steps[:3]


def test_a_metric_that_begins_late_is_null_before():
    curves = Curves()
    curves.add(1, 0.0, {"x": 1.0})
    curves.add(2, 0.0, {"y": 2.0})
    data = json.loads(curves.text())
    assert data["names"] == ["x", "y"]
    assert data["rows"] == [[1, 0, 1], [2, 0, None, 2]]


def test_values_of_tokens():
    assert per_token([1.5, 1.5], 1000) == 1500
    assert per_token([1.0, np.nan], 10) == [10, None]
    assert per_token([np.nan]) is None


def test_characters_of_several_tokens():
    """Shown once: the tokens' texts make up that of all of them."""
    tokenizer = kpt.Tokenizer.from_directory(MODEL)
    words, text = Words(tokenizer), "a 🦙 é 雪!"
    ids = tokenizer.encode(text)
    words.add(ids)
    shown = [words.texts[i] for i in ids]
    assert any(BROKEN in x for x in shown)
    for at, size, whole in words.whole(ids):
        shown[at : at + size] = [whole] + [""] * (size - 1)
    assert "".join(shown) == text
    again = Words(tokenizer)
    again.restore(json.loads(words.text()))
    assert again.texts == words.texts


def test_samples_are_bounded():
    """Of many the first, the newest and some between are kept."""
    samples = Samples(None, max_bytes=4000)
    ids = np.arange(40)[None]
    batch = {
        "token_ids": ids,
        "segment_ids": np.ones_like(ids),
        "completion_mask": np.ones(ids.shape, np.float32),
        "sequence_mask": np.ones((1, 1), np.float32),
        "sequence_ids": np.zeros((1, 1), np.int32),
    }
    for step in range(1, 200):
        samples.add_rows(step, batch)
    data = json.loads(samples.text())
    steps = [entry["step"] for entry in data["kept"]]
    assert len(samples.text()) < 5000
    assert steps[0] == 1 and steps[-1] == 199 and 5 < len(steps) < 100
    assert steps == sorted(steps)


def test_a_long_segment_loses_its_middle():
    samples = Samples(None)
    found = samples._tokens(np.arange(2000), {}, {"mask": np.ones(2000)})
    assert found["ids"] == [*range(512), *range(976, 2000)]
    assert (found["cut"], found["head"], found["mask"]) == (464, 512, 1000)


def test_time_is_counted_once():
    """6 s of spans: an inner one lies in another, which ends later."""
    timeline = Timeline(0.0)
    thread = timeline._main
    for name, start, end, where in (
        ("log-probs", 1.0, 2.0, thread),
        ("batches", 0.0, 3.0, thread),
        ("train", 4.0, 7.0, thread),
        ("rollout", 0.0, 50.0, thread + 1),
    ):
        timeline(_spans.Span(name, start, end, "", where))
    data = json.loads(timeline.text(10.0))
    assert data["own"] == 6.0 and data["totals"]["rollout"] == [50.0, 1]


def diagnose(lines):
    found = Diagnoses()
    for step, logs in enumerate(lines):
        found.add(step, logs, is_first=True)
    return {d["name"]: d for d in found.data()}


STEP = {"loss": 1.0, "grad_norm": 1.0}
SAMPLED = {**STEP, "completions/mean_length": 5.0, "entropy": 1.0}


@pytest.mark.parametrize(
    "name, lines",
    [
        ("not finite", [{"loss": float("nan"), "grad_norm": 1.0}]),
        ("gradient spike", [STEP] * 12 + [{**STEP, "grad_norm": 11.0}]),
        ("equal rewards", [{**STEP, "frac_reward_zero_std": 0.9}] * 5),
        (
            "entropy",
            [SAMPLED] * 20 + [{**SAMPLED, "entropy": 0.4}] * 10,
        ),
        ("length limit", [{**STEP, "completions/clipped_ratio": 0.5}] * 5),
        ("first ratio", [{**STEP, "clip_ratio/region_mean": 0.1}]),
        (
            "engine and trainer",
            [{**STEP, "sampling/sampling_logp_difference/mean": 0.1}] * 5,
        ),
        (
            "tool calls",
            [{**STEP, "tools/calls": 1.0, "tools/unreadable": 1.0}] * 5,
        ),
        ("failed episodes", [{**STEP, "episodes/failed": 2.0}]),
        ("KL", [{**STEP, "kl": 1.0}] * 5),
        ("skipped steps", [{**STEP, "skipped": 1.0}] * 10),
        (
            "chosen answers",
            [{**STEP, "rewards/chosen": -2.0, "rewards/margins": 1.0}] * 20,
        ),
        ("value model", [{**STEP, "value/explained_variance": -0.1}] * 20),
    ],
)
def test_a_diagnosis(name, lines):
    """Found where it holds, and not in a run that is well."""
    found = diagnose(lines)
    assert list(found) == [name]
    assert found[name]["text"] and found[name]["advice"]
    well = SAMPLED | {
        "frac_reward_zero_std": 0.2,
        "completions/clipped_ratio": 0.1,
        "clip_ratio/region_mean": 0.0,
        "sampling/sampling_logp_difference/mean": 1e-4,
        "tools/calls": 2.0,
        "tools/unreadable": 0.1,
        "episodes/failed": 0.0,
        "kl": 0.05,
        "skipped": 0.0,
        "rewards/chosen": 0.5,
        "rewards/margins": 1.0,
        "value/explained_variance": 0.5,
    }
    assert diagnose([well] * 40) == {}


def test_a_step_after_some_without_gradients_is_no_spike():
    assert diagnose([{**STEP, "grad_norm": 0.0}, STEP] * 20) == {}
    lines = [{**STEP, "grad_norm": 0.0}] * 12 + [STEP]
    assert diagnose(lines) == {}


def test_secrets_are_not_shown():
    shown = command(
        ["train.py", "--hf-token", "abc", "--api_key=abc", "--max-tokens", "5"]
    )
    assert "abc" not in shown and shown.endswith("--max-tokens 5")


# Hostile texts


def hostile_page(folder):
    """A page all of whose texts are hostile."""
    run = json.loads(json.dumps(template(), ensure_ascii=True))
    text = encode(run).replace("TEXT", encode(HOSTILE)[1:-1])
    path = folder / "report.html"
    page.write(path, page.render([text]))
    return path


@functools.cache
def template():
    item = {
        "ended": "TEXT", "length": 3, "player": "TEXT", "error": "TEXT",
        "turns": 2, "reward": 1.0, "advantage": 0.5,
        "rewards": {"TEXT": 1.0, "TEXT2": 0.0},
        "segments": [{
            "ids": [1, 2, 3], "turn": [-1, 0, 0], "mask": [0, 1000, 1000],
            "logp": [None, -100, -2000], "old": [None, -120, -1900],
            "version": [-1, 0, 1], "advantage": [None, 300, -200],
        }],
    }  # fmt: skip
    entry = {
        "step": 1, "kind": "rollout", "of": 1,
        "groups": [
            {"row": "TEXT", "items": [item, {**item, "text": "TEXT"}]}
        ],
    }  # fmt: skip
    names = ["loss", "TEXT", "rewards/TEXT/mean", "rewards/TEXT/std"]
    curves = {
        "names": names,
        "stride": 2,
        "rows": [[i, i, i * i, 1, i, 0.5] for i in range(1, 30)],
    }
    pairs = {"TEXT": "TEXT", "n": 3}
    return {
        "about": {
            "status": "TEXT", "error": "TEXT", "activity": "TEXT",
            "step": 3, "last": 9, "started": 0, "written": 0, "every": 30,
            "resumed": [1], "seconds": 0.1, "elapsed": 12.0,
        },
        "environment": {
            "run": {"task": "TEXT", "preset": "TEXT", "TEXT": "TEXT"},
            "versions": pairs, "TEXT": pairs,
            "command": {"directory": "TEXT", "to resume": "TEXT"},
        },
        "diagnoses": [{
            "name": "TEXT", "level": "error", "text": "TEXT",
            "advice": "TEXT", "first": 1, "last": 2,
        }],
        "curves": curves,
        "validation": {"names": ["val_TEXT"], "stride": 1,
                       "rows": [[1, 1, 1], [9, 2, 2]]},
        "samples": {"kept": [entry], "seen": 3, "skipped": 1,
                    "words": {"1": "TEXT", "2": "TEXT", "3": "TEXT"}},
        "timeline": {
            "names": ["TEXT", "train"], "offset": 0, "own": 1.0, "count": 2,
            "spans": [[0, 0, 900, "TEXT", 0], [1, 2000, 9000, "TEXT", 0]],
            "until": 12000, "totals": {"TEXT": [1.0, 1]},
            "compiled": [["TEXT", 1.0, 1]],
        },
        "memory": {"kinds": {"TEXT": 5}, "devices": [["TEXT", 1, 2, 3]],
                   "host": [1, 2]},
        "data": {"text": "TEXT", "dropped": {"TEXT": 3}, "TEXT": "TEXT"},
    }  # fmt: skip


def test_hostile_texts_stay_data(tmp_path):
    """No tag ends or begins in the data, which reads back as it was."""
    text = hostile_page(tmp_path).read_text(encoding="utf-8")
    outside = page.DATA.sub("", text)
    assert "pwned" not in outside and "onerror" not in outside
    inside = page.DATA.search(text)[1]
    assert "<" not in inside and HOSTILE.encode("ascii", "ignore")
    (run,) = page.read(tmp_path / "report.html")
    assert run["about"]["error"] == HOSTILE
    # Nothing in the script makes HTML of a text, and nothing is fetched.
    script = (page.FOLDER / "page.js").read_text(encoding="utf-8")
    for word in (
        "innerHTML", "outerHTML", "insertAdjacent", "document.write",
        "eval(", "Function(", "fetch(", "XMLHttp", "import(", "srcdoc",
    ):  # fmt: skip
        assert word not in script, word
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    with pytest.raises(ValueError, match="encoded"):
        page.render(["{}<"])


@pytest.fixture(scope="module")
def chromium():
    if browser.find() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    tab = browser.Browser()
    yield tab
    tab.close()


def test_a_browser_shows_hostile_texts_as_text(chromium, tmp_path):
    chromium.errors.clear()
    chromium.requests.clear()
    path = hostile_page(tmp_path)
    for width, dark in ((1400, False), (400, True)):
        chromium.open(path, width, dark=dark)
        for kind in ("group", "steps", "one"):
            chromium.run(f"state.view = '{kind}'; state.item = ''; 0")
            for name in ("writer", "ratio", "advantage", "version", "mask"):
                chromium.run(
                    f"state.shade = '{name}'; "
                    "document.getElementById('samples').replaceChildren("
                    "samples()); 0"
                )
                shown = chromium.run("document.body.innerText")
                assert "This part cannot be shown" not in shown
        assert "onerror=" in shown and "</script>" in shown
        assert chromium.run("typeof window.pwned") == "undefined"
        assert chromium.run("document.querySelectorAll('img').length") == 0
        assert chromium.run("document.querySelectorAll('script').length") == 2
        # Nothing is wider than the window, and all parts are drawn.
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert chromium.run("document.querySelectorAll('svg').length") >= 4
    assert chromium.errors == []
    outside = [x for x in chromium.requests if not x.startswith("file:")]
    assert outside == [] and len(set(chromium.requests)) == 1


def test_the_policy_stops_scripts_and_requests(chromium, tmp_path):
    """Were a text HTML after all, it could neither run nor report."""
    path = hostile_page(tmp_path)
    text = path.read_text(encoding="utf-8")
    more = "<script>window.pwned=1</script><img src='http://127.0.0.1:9/x'>"
    path.write_text(text.replace("</body>", more + "</body>"))
    chromium.errors.clear()
    chromium.open(path)
    assert chromium.run("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in x for x in chromium.errors)


def two_runs(folder):
    """A page of two runs that were the same; of one there is a log alone."""
    for name in ("a", "b"):
        fit_rows(
            kpt.callbacks.Report(folder / name),
            kpt.callbacks.MetricsLog(folder / name),
        )
    (folder / "b" / "report.html").unlink()
    runs = {f"run {x}": folder / x for x in ("a", "b")}
    return kpt.report(runs, folder / "both.html")


def test_several_runs_on_one_page(tmp_path):
    path = two_runs(tmp_path)
    a, b = page.read(path)
    assert (a["name"], b["name"]) == ("run a", "run b")
    np.testing.assert_allclose(values(a, "loss"), values(b, "loss"), 1e-4)
    # A page of several runs is one of a run, too.
    again = kpt.report([path], tmp_path / "again.html")
    assert [x["name"] for x in page.read(again)] == ["run a", "run b"]


def test_a_browser_lays_curves_over_each_other(chromium, tmp_path):
    chromium.errors.clear()
    chromium.open(two_runs(tmp_path))
    shown = chromium.run("document.body.innerText")
    assert "run a: loss" in shown and "run b: loss" in shown
    assert "This part cannot be shown" not in shown
    assert chromium.errors == []


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must have a 'report.html'"):
        kpt.report([tmp_path], tmp_path / "x.html")
    (tmp_path / "report.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="must be a page"):
        kpt.report(tmp_path, tmp_path / "x.html")
    with pytest.raises(ValueError, match="at least one"):
        kpt.report([], tmp_path / "x.html")


@pytest.mark.full
def test_overlapping_rollouts(tmp_path, monkeypatch):
    """Spans of the threads that sample, and the age of samples."""
    monkeypatch.setattr(report, "BUDGET", 1.0)
    grpo().fit(
        PROMPTS,
        batch_size=2,
        epochs=3,
        verbose=0,
        max_staleness=1,
        callbacks=[kpt.callbacks.Report(tmp_path)],
    )
    run = read(tmp_path)
    assert max(values(run, "staleness/max")) == 1
    names, spans = run["timeline"]["names"], run["timeline"]["spans"]
    found = {(names[name], other) for name, _, _, _, other in spans}
    assert {("rollout", 1), ("wait", 0), ("train", 0)} <= found
    versions = {
        version
        for entry in run["samples"]["kept"]
        for group in entry["groups"]
        for item in group["items"]
        for segment in item["segments"]
        for version in np.ravel(segment["version"]).tolist()
    }
    assert len(versions - {-1}) > 1
