"""Rows are tokenized once: the cache, several processes, rows on disk."""

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import grain
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data import order
from keras_posttrain.data.batches.distillation import (
    distillation_layout,
    fit_teacher_rows,
)
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.chat import template
from keras_posttrain.data.rows import (
    cache,
    files,
    lines,
    parallel,
    prepare,
    store,
)
from keras_posttrain.data.rows.columns import MixedRow
from keras_posttrain.data.rows.examples import summary_of
from keras_posttrain.data.rows.preference import prepare_preferences
from keras_posttrain.data.rows.prompts import PromptOrder
from keras_posttrain.data.rows.records import Part
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.store import StoredExamples, StoreWriter
from keras_posttrain.training import preference_checks
from tests.data.row_kinds import (
    KINDS,
    TOKENIZER,
    assert_same,
    distillation,
    labelled,
    plain,
    prompts,
    settings,
)
from tests.data.support import chat_tokenizer
from tests.support import REFERENCE, one_layer

ROOT = pathlib.Path(__file__).parents[2]
COUNT = 90


def make_rows(kind, count=COUNT):
    return [KINDS[kind][1](i) for i in range(count)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's directory; whatever takes any time at all is stored."""
    monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("KERAS_POSTTRAIN_WORKERS", "1")
    monkeypatch.setattr(prepare, "PATIENCE", 0.0)
    return tmp_path / "rows"


def uncached(monkeypatch, function, rows, given):
    with monkeypatch.context() as patch:
        patch.setenv("KERAS_POSTTRAIN_CACHE", "off")
        patch.setattr(prepare, "PATIENCE", 1e9)
        examples, report = function(rows, given)
    assert isinstance(examples, list)
    return examples, report


def uncached_examples(kind, count):
    function, make = KINDS[kind]
    return function([make(i) for i in range(count)], settings())[0]


def entries(folder):
    return sorted(folder.glob("*.rows"))


def forbid_tokenizing(monkeypatch):
    """Makes all that tokenizes and renders raise."""

    def refuse(*_, **__):
        raise AssertionError("A row was tokenized.")

    for name in ("encode", "encode_mixed", "encode_with_offsets"):
        monkeypatch.setattr(kpt.Tokenizer, name, refuse)
    monkeypatch.setattr(template, "_render", refuse)
    monkeypatch.setattr(prepare, "prepare_part", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_tokenizes_nothing(kind, folder, monkeypatch):
    function, _ = KINDS[kind]
    expected = uncached(monkeypatch, function, make_rows(kind), settings())
    first = function(make_rows(kind), settings())
    assert isinstance(first[0], StoredExamples)
    assert_same(first, expected)
    forbid_tokenizing(monkeypatch)
    second = function(make_rows(kind), settings())
    assert_same(second, expected)
    assert len(entries(folder)) == 1


@pytest.fixture
def reads(monkeypatch):
    """A list of the stored examples that are read, by their indices."""
    found, read = [], StoredExamples.__getitem__

    def note(self, index):
        example = read(self, index)
        found.append(index)
        return example

    monkeypatch.setattr(StoredExamples, "__getitem__", note)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_are_those_of_the_examples(kind, folder, reads):
    examples, _ = KINDS[kind][0](make_rows(kind), settings())
    ours, theirs = summary_of(examples), summary_of(list(examples))
    assert len(reads) == len(examples) == COUNT
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert plain(ours[name]) == plain(theirs[name])
    assert ours["tokens"].tolist() == [len(x.token_ids) for x in examples]


def test_what_some_kinds_of_examples_lack_is_minus_one(tmp_path):
    kinds = ["text", "pairs", "text"]
    lists = [uncached_examples(kind, 3) for kind in kinds]
    writer = StoreWriter(tmp_path / "new")
    for examples in lists:
        writer.add(Part.of(examples))
    writer.finish({})
    found = StoredExamples(writer.path).summary
    assert plain(found) == plain(summary_of(sum(lists, [])))
    has_prompt = [kind == "pairs" for kind in kinds for _ in range(3)]
    assert (found["prompt"] >= 0).tolist() == has_prompt


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_a_second_start_on_preferences_reads_no_row(
    kind, share_prefix, folder, reads
):
    loss = {"pairs": kpt.losses.DPOLoss(), "labelled": kpt.losses.KTOLoss()}
    task = kpt.DPOTask.from_preset(
        REFERENCE / "models/qwen3", sequence_length=64, lora=kpt.LoRA(rank=2)
    )
    task.compile("sgd", loss[kind])
    task.share_prefix = share_prefix
    examples, _ = task.prepare(make_rows(kind))
    assert isinstance(examples, StoredExamples)
    given = [examples, list(examples)]
    del reads[:]
    if task.labelled:
        preference_checks.both_labels(task.objective, examples)
    ours, theirs = [
        task.make_batches(x, 4, packing=True, shuffle=False) for x in given
    ]
    assert not reads
    assert ours.fingerprint == theirs.fingerprint
    first = [next(x.get_jax_iterator()) for x in (ours, theirs)]
    assert {k: plain(v) for k, v in first[0].items()} == {
        k: plain(v) for k, v in first[1].items()
    }


def test_stored_preferences_are_refused_as_others_are(folder):
    rows = [{**row, "label": True} for row in make_rows("labelled")]
    examples, _ = labelled(rows, settings())
    assert isinstance(examples, StoredExamples)
    for given in (examples, list(examples)):
        with pytest.raises(ValueError, match=f"label=True in all {COUNT}"):
            preference_checks.both_labels(kpt.losses.KTOLoss(), given)
    rows = [
        {"chosen_ids": [1 + i // 50, 2, 3], "rejected_ids": [1, 4]}
        for i in range(COUNT)
    ]
    examples, _ = prepare_preferences(
        rows, settings(), labelled=False, share_prompt=False
    )
    assert isinstance(examples, StoredExamples)
    for given in (examples, list(examples)):
        with pytest.raises(ValueError, match="none in row 50"):
            preference_checks.prompts(given)


def test_teachers_rows_are_fitted_without_reading_rows(folder, reads):
    examples, _ = distillation(make_rows("distillation"), settings())
    layout = distillation_layout(
        batch_size=4, sequence_length=128, token_budget=512
    )
    fitted = [fit_teacher_rows(layout, x) for x in (list(examples), examples)]
    # The last ones ask whether the teacher reads other tokens.
    assert set(reads[COUNT:]) == {0}
    assert fitted[0].extras == fitted[1].extras != layout.extras


def test_a_second_start_on_prompts_reads_those_of_its_rollout(folder, reads):
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/qwen3", sequence_length=64
    )
    rows = [{"prompt": f"{i} is", "n": i} for i in range(COUNT)]
    scored = []

    def reward(completions, n):
        scored.extend(n)
        raise KeyboardInterrupt

    task.compile(rewards=[reward], num_generations=2, max_completion_length=2)
    prompts, _ = task.prepare_prompts(rows)
    assert isinstance(prompts, StoredExamples)
    with pytest.raises(KeyboardInterrupt):
        task.fit(rows, batch_size=3, verbose=0)
    # The first one says which columns there are.
    assert len(set(scored)) == 3 and set(reads) == {0, *scored}


@pytest.mark.parametrize("packing", [False, True])
def test_cached_rows_make_the_same_batches(packing, folder, monkeypatch):
    rows = make_rows("chat")
    expected, _ = uncached(monkeypatch, prepare_sft, rows, settings())
    ours = [expected, prepare_sft(rows, settings())[0]]
    assert isinstance(ours[1], StoredExamples)
    adapters = [
        BatchAdapter(x, batch_size=4, sequence_length=128, packing=packing)
        for x in ours
    ]
    assert adapters[0].fingerprint == adapters[1].fingerprint
    for _ in range(2):
        batches = [list(x.get_jax_iterator()) for x in adapters]
        for a, b in zip(*batches, strict=True):
            assert {k: plain(v) for k, v in a.items()} == {
                k: plain(v) for k, v in b.items()
            }
    assert adapters[0].state_after(30) == adapters[1].state_after(30)


def test_cached_prompts_are_taken_in_the_same_order(folder, monkeypatch):
    rows = make_rows("prompts")
    expected, _ = uncached(monkeypatch, prompts, rows, settings())
    orders = [
        PromptOrder(x, batch_size=4)
        for x in (expected, prompts(rows, settings())[0])
    ]
    assert orders[0].state() == orders[1].state()
    taken = [[plain(x) for x in o.take(7)] for o in orders]
    assert taken[0] == taken[1]


def key(rows, given=None, function=prepare_sft):
    """The path of the entry that a call would use."""
    found = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_read", lambda entry, *_: found.append(entry))
        patch.setattr(prepare, "PATIENCE", 60.0)
        function(rows, given or settings())
    return found[0].path


def test_equal_content_has_one_entry(folder):
    rows = make_rows("chat")
    # Equal, but of other objects.
    same = json.loads(json.dumps(rows))
    shared = [{**row, "unread": row["unread"]} for row in rows]
    assert key(rows) == key(same) == key(shared)
    assert key(rows, settings(name="another")) == key(rows)
    copy = kpt.Tokenizer.from_directory(REFERENCE / "models/qwen3")
    again = kpt.Tokenizer.from_directory(REFERENCE / "models/qwen3")
    assert key(rows, settings(copy)) == key(rows, settings(again))


def test_whatever_changes_rows_has_another_entry(folder, monkeypatch):
    rows = make_rows("chat")
    other = make_rows("chat")
    other[-1]["messages"][1]["content"] += " "
    text = TOKENIZER.chat_template
    added = chat_tokenizer("qwen2_5")
    added.backend.add_tokens(["<another>"])
    as_tuple = [{**row, "unread": (row["unread"],)} for row in rows]
    as_list = [{**row, "unread": [row["unread"]]} for row in rows]
    keys = [
        key(rows),
        key(other),
        key(rows[::-1]),
        key(rows[:-1]),
        key(as_tuple),
        key(as_list),
        key(rows, settings(TOKENIZER.with_chat_template(text + " "))),
        key(rows, settings(added)),
        key(rows, settings(sequence_length=127)),
        key(rows, settings(vocabulary_size=599)),
        key(rows, settings(truncation="drop")),
        key(rows, settings(chat_template_kwargs={"a": 1})),
        key(rows, settings(chat_template_kwargs={"a": True})),
        key(rows, function=lambda r, s: prepare_sft(r, s, "completion")),
        key(rows, function=prompts_of_chats),
    ]
    dated = TOKENIZER.with_chat_template(
        "{% if false %}{{ strftime_now('%d') }}{% endif %}" + text
    )
    keys.append(key(rows, settings(dated)))

    class Tomorrow(cache.datetime.date):
        @classmethod
        def today(cls):
            return cls(2100, 1, 1)

    monkeypatch.setattr(cache.datetime, "date", Tomorrow)
    keys.append(key(rows, settings(dated)))
    assert key(rows) == keys[0]
    monkeypatch.setattr(cache, "_versions", lambda: (b"new code",))
    keys.append(key(rows))
    assert len(set(keys)) == len(keys)


def prompts_of_chats(rows, given):
    return prompts([{"prompt": row["messages"]} for row in rows], given)


def test_hugging_face_rows_are_known_by_content(folder):
    datasets = pytest.importorskip("datasets")
    rows = make_rows("chat")
    first = datasets.Dataset.from_list(rows)
    second = datasets.Dataset.from_list(rows[:-1] + rows[:1])
    assert key(first) == key(datasets.Dataset.from_list(rows))
    assert key(first) != key(second)
    # An order of indices is part of the content.
    assert key(first) != key(first.select(range(COUNT)[::-1]))
    assert_same(prepare_sft(first, settings()), prepare_sft(rows, settings()))


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "text"])
def test_a_damaged_entry_is_made_again(damage, folder, monkeypatch):
    rows = make_rows("text")
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    prepare_sft(rows, settings())
    [path] = entries(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(
        {
            "changed": bytes(data),
            "cut": bytes(data[:-100]),
            "empty": b"",
            "text": b"x" * len(data),
        }[damage]
    )
    assert_same(prepare_sft(rows, settings()), expected)
    forbid_tokenizing(monkeypatch)
    assert_same(prepare_sft(rows, settings()), expected)


def test_an_entry_of_another_layout_is_made_again(folder, monkeypatch):
    rows = make_rows("text")
    with monkeypatch.context() as patch:
        patch.setattr(store, "MAGIC", b"keras_posttrain rows 1\n")
        prepare_sft(rows, settings())
    [path] = entries(folder)
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    assert_same(prepare_sft(rows, settings()), expected)
    assert path.read_bytes().startswith(store.MAGIC)


def test_a_full_disk_is_no_failure(folder, monkeypatch):
    rows = make_rows("chat", 400)
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    write, parts = StoreWriter._write, []

    def fail(self, data):
        parts.append(data)
        if len(parts) > 3:
            # A part of it was written.
            write(self, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(StoreWriter, "_write", fail)
    monkeypatch.setattr(parallel, "SIZE", 64)
    with pytest.warns(UserWarning, match="No space left") as found:
        examples = prepare_sft(rows, settings())
    assert len(found) == 1 and "KERAS_POSTTRAIN_CACHE" in str(found[0].message)
    assert len(parts) == 4
    assert_same(examples, expected)
    assert not list(folder.glob("*.new")) and not entries(folder)


def test_a_directory_that_cannot_be_written_is_no_failure(folder, monkeypatch):
    folder.parent.joinpath("rows").write_text("a file")
    rows = make_rows("text")
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert_same(prepare_sft(rows, settings()), expected)


def test_old_entries_are_removed(folder, monkeypatch):
    month = 31 * cache.DAY
    for name, age in [("old.rows", month), ("left.new", 2 * cache.DAY)]:
        folder.mkdir(exist_ok=True)
        folder.joinpath(name).write_bytes(b"x")
        when = time.time() - age
        os.utime(folder / name, (when, when))
    for name, age in [("a.rows", 3), ("b.rows", 2), ("c.rows", 1)]:
        folder.joinpath(name).write_bytes(b"x" * 100)
        when = time.time() - age * 1000
        os.utime(folder / name, (when, when))
    folder.joinpath("now.new").write_bytes(b"x")
    rows = make_rows("text")
    prepare_sft(rows, settings())
    left = {path.name for path in folder.iterdir()}
    assert left >= {"a.rows", "b.rows", "c.rows", "now.new"}
    assert not left & {"old.rows", "left.new"}
    size = max(path.stat().st_size for path in entries(folder))
    monkeypatch.setattr(cache, "MAX_BYTES", 2 * size + 150)
    prepare_sft(make_rows("text")[::-1], settings())
    left = {path.name for path in folder.iterdir()}
    assert "c.rows" in left and not left & {"a.rows", "b.rows"}
    assert len(entries(folder)) == 3


def test_few_rows_and_quick_ones_are_not_stored(folder, monkeypatch):
    prepare_sft(make_rows("text", prepare.SIZE), settings())
    monkeypatch.setattr(prepare, "PATIENCE", 60.0)
    prepare_sft(make_rows("text"), settings())
    monkeypatch.setattr(prepare, "PATIENCE", 0.0)
    monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", "off")
    examples, _ = prepare_sft(make_rows("text"), settings())
    assert isinstance(examples, list) and not folder.exists()


def test_two_at_once_tokenize_once(folder, monkeypatch):
    """A thread locks as a process does: each opens the lock's file."""
    rows = make_rows("chat", 300)
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    written, found = [], []
    finish = StoreWriter.finish

    def slowly(self, report):
        written.append(self)
        time.sleep(0.3)
        finish(self, report)

    monkeypatch.setattr(StoreWriter, "finish", slowly)
    threads = [
        threading.Thread(
            target=lambda: found.append(prepare_sft(rows, settings()))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(found) == 3
    for each in found:
        assert_same(each, expected)


SCRIPT = """
import json, sys
from keras_posttrain.data.rows import prepare
from tests.data import row_kinds as tests
prepare.PATIENCE = 0.0
rows = json.loads(open(sys.argv[1]).read())
print("ready", flush=True)
examples, report = tests.prepare_sft(rows, tests.settings())
print(len(examples), type(examples).__name__, flush=True)
"""


def test_a_killed_process_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    """Another process, which waits for it, takes over."""
    rows = make_rows("chat", 6000)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    environment = os.environ | {"KERAS_POSTTRAIN_WORKERS": "2"}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for _ in range(2)
    )
    # One of them writes, the other one waits.
    limit = time.monotonic() + 120
    while not any(x.stat().st_size > 2e5 for x in folder.glob("*.new")):
        assert time.monotonic() < limit
        time.sleep(0.01)
    workers = children(first.pid), children(second.pid)
    writer, other = (first, second) if workers[0] else (second, first)
    writer.kill()
    out, _ = other.communicate(timeout=120)
    writer.communicate()
    assert other.returncode == 0 and "6000 StoredExamples" in out
    assert writer.returncode == -signal.SIGKILL
    for process in (*workers[0], *workers[1]):
        wait_for_end(process)
    monkeypatch.setattr(prepare, "prepare_part", None)
    assert len(prepare_sft(rows, settings())[0]) == 6000


def children(pid):
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    found = list(map(int, path.read_text().split()))
    # Threads start processes too.
    for each in pathlib.Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (each / "children").read_text().split())
    return found


def wait_for_end(pid):
    limit = time.monotonic() + 30
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit, f"process {pid} is still there"
        time.sleep(0.05)


# Several processes


def with_workers(monkeypatch):
    monkeypatch.setenv("KERAS_POSTTRAIN_WORKERS", "2")
    monkeypatch.setattr(parallel, "SIZE", 64)


@pytest.mark.parametrize(
    "cached, kinds",
    [
        (True, ("chat", "distillation", "prompts")),
        # What is sent and comes back does not depend on where it is kept.
        (False, ("chat",)),
        pytest.param(
            False, ("distillation", "prompts"), marks=pytest.mark.full
        ),
    ],
)
def test_workers_give_what_one_process_gives(
    cached, kinds, folder, monkeypatch
):
    with_workers(monkeypatch)
    if not cached:
        monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", "off")
    for kind in kinds:
        function, _ = KINDS[kind]
        rows = make_rows(kind, 400)
        expected = uncached(monkeypatch, function, rows, settings())
        with monkeypatch.context() as patch:
            # This process prepares the first rows only.
            patch.setattr(parallel, "prepare_part", None)
            found = function(rows, settings())
        assert isinstance(found[0], StoredExamples if cached else list)
        assert_same(found, expected)


def test_errors_of_workers_name_the_row(folder, monkeypatch):
    with_workers(monkeypatch)
    bad = [
        {"messages": "no list"},
        {"text": "of another type"},
        {"messages": [{"role": "assistent", "content": "a"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        None,
    ]
    for row in bad:
        rows = make_rows("chat", 300)
        rows[200] = rows[250] = row
        messages = []
        for patience in (1e9, 0.0):
            monkeypatch.setattr(prepare, "PATIENCE", patience)
            if row is None:
                prepare_sft(rows, settings())
                messages.append("row 200")
                continue
            with pytest.raises(ValueError) as error:
                prepare_sft(rows, settings())
            messages.append(str(error.value))
        assert messages[0] == messages[1] and "row 200" in messages[0]
    assert not list(folder.glob("*.new"))


def test_a_type_that_only_workers_see_twice_is_refused(folder, monkeypatch):
    """Each worker alone sees one type of rows of the second dataset."""
    with_workers(monkeypatch)
    monkeypatch.setattr(parallel, "SIZE", 40)
    second = make_rows("text", 40) + make_rows("tokens", 40)
    rows = [MixedRow(row, "a") for row in make_rows("chat", 64)]
    rows += [MixedRow(row, "b") for row in second]
    with pytest.raises(ValueError, match="must be of one type") as error:
        prepare_sft(rows, settings())
    assert "row 64" in str(error.value) and "row 104" in str(error.value)


class Unsendable:
    """A value that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def test_rows_that_cannot_be_sent_are_tokenized_here(folder, monkeypatch):
    with_workers(monkeypatch)
    rows = make_rows("text", 200)
    rows[100]["unread"] = Unsendable()
    expected = uncached(monkeypatch, prepare_sft, rows, settings())
    # They have no content that could be hashed either.
    found = prepare_sft(rows, settings())
    assert isinstance(found[0], list)
    assert_same(found, expected)


def test_an_interrupted_start_ends_its_workers(folder, monkeypatch):
    with_workers(monkeypatch)
    started = []
    call = parallel.Workers

    def remember(*args):
        started.append(call(*args))
        return started[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "Workers", remember)
    monkeypatch.setattr(parallel, "_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_sft(make_rows("text", 400), settings())
    processes = [w.process for w in list(started[0]._started)]
    assert all(x.wait(30) == -signal.SIGKILL for x in processes)
    assert not list(folder.glob("*.new"))


def test_the_number_of_workers_is_checked(monkeypatch):
    monkeypatch.delenv("KERAS_POSTTRAIN_WORKERS", raising=False)
    assert parallel.num_workers() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("KERAS_POSTTRAIN_WORKERS", "0")
    assert parallel.num_workers() == 1
    monkeypatch.setenv("KERAS_POSTTRAIN_WORKERS", "many")
    with pytest.raises(ValueError, match="Received: .*'many'"):
        parallel.num_workers()


def test_progress_has_the_rate_and_the_time_left(folder, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "FIRST_LINE", 0.0)
    prepare_sft(make_rows("text", 2000), settings())
    shown = capsys.readouterr().out
    assert "of 2,000 rows tokenized, " in shown
    assert " rows/s, " in shown and " s left" in shown
    # A run that prints nothing says nothing here either.
    task = tiny_task()
    task.fit(make_rows("text", 100), batch_size=50, verbose=0)
    assert capsys.readouterr().out == ""


# A whole run


def tiny_task(**kwargs):
    task = kpt.SFTTask.from_preset(
        one_layer(REFERENCE / "models/qwen3"), sequence_length=64, **kwargs
    )
    task.compile("sgd")
    return task


def test_a_run_that_is_resumed_tokenizes_nothing(
    folder, tmp_path, monkeypatch
):
    rows = make_rows("text")
    given = {"batch_size": 45, "shuffle": True, "verbose": 0}

    def run(epochs, name, is_again=False):
        task = tiny_task(chat_template_kwargs={"nested": {"a": [1]}})
        if is_again:
            forbid_tokenizing(monkeypatch)
        checkpoint = kpt.callbacks.Checkpoint(tmp_path / name, every=1)
        task.fit(rows, epochs=epochs, callbacks=[checkpoint], **given)
        return [np.array(w) for w in task.causal_lm.get_weights()]

    straight = run(2, "straight")
    run(1, "resumed")
    assert len(entries(folder)) == 1
    for a, b in zip(straight, run(2, "resumed", True), strict=True):
        assert a.tobytes() == b.tobytes()


# Rows on disk


LINES = [
    b'{"text": "one"}\n{"text": "two"}',
    b'\xef\xbb\xbf{"text": "a mark"}\n\n   \n\t{"text": "spaces"}\r\n\r\n',
    '{"text": "é"}\n\u00a0\n\u2003\n  {"text": "wide spaces"}\n'.encode(),
    b'{"text": "one"}\n\n{"text": \n',
    b'{"text": "one"}\n\n\n{"text": "\xff"}\n',
    '{"text": "one"}\n'.encode("utf-16"),
    b'{"text": "one"}\n{"text": "' + b"[" * 9999 + b'"}',
    b"[" * 9999 + b"\n",
]


@pytest.mark.parametrize("content", LINES, ids=range(len(LINES)))
def test_lines_on_disk_are_the_rows_of_the_file(
    content, tmp_path, monkeypatch
):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    paths[0].write_bytes(b'{"text": "the first file"}\n')
    paths[1].write_bytes(content)
    monkeypatch.setattr(lines, "BLOCK", 16)

    def read():
        try:
            rows = files.read_files(paths, "dataset")
            return [rows[i] for i in range(len(rows))], rows
        except ValueError as error:
            return str(error), None

    expected, _ = read()
    monkeypatch.setattr(files, "LARGE", 0)
    found, rows = read()
    assert found == expected
    if rows is not None:
        assert isinstance(rows, lines.LineRows)
        assert rows[:] == rows[0 : len(rows)] == expected
        assert rows[-1] == expected[-1]


def test_files_are_known_by_content(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE", 0)
    text = "".join(json.dumps(row) + "\n" for row in make_rows("text"))
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    paths[0].write_text(text)
    paths[1].write_text(text)
    paths[2].write_text(text.replace("of 7 ", "of 8 "))
    os.utime(paths[1], (0, 0))
    assert key(str(paths[0])) == key(str(paths[1])) != key(str(paths[2]))


def test_compressed_and_small_files_are_read_at_once(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n')
    assert isinstance(files.read_files(path, "dataset"), list)
    monkeypatch.setattr(files, "LARGE", 0)
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    # Whatever its name says.
    hidden = tmp_path / "c.jsonl"
    hidden.write_bytes(zipped.read_bytes())
    for other in (zipped, hidden, [path, zipped]):
        assert isinstance(files.read_files(other, "dataset"), list)


def test_rows_stay_on_disk(folder, tmp_path, monkeypatch):
    """A row takes the bytes of its place in two files, not of its tokens."""
    monkeypatch.setattr(files, "LARGE", 0)
    count, path = 3_000, tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for i in range(count):
            ids = [i % 500] * 150
            file.write(json.dumps({"token_ids": ids, "n": i}) + "\n")
    given = settings(None, sequence_length=256)
    tracemalloc.start()
    try:
        examples, _ = prepare_sft(str(path), given)
        data = BatchAdapter(examples, batch_size=8, sequence_length=256)
        batches = data.get_jax_iterator()
        next(batches)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    batches.close()
    assert size < 2**20 + 60 * count


def test_orders_are_grains():
    for size in (1, 2, 3, 257, order.FEW, order.FEW + 1, 1000):
        for shuffle, seed, stream in [
            (True, 0, 0),
            (True, 5, 3),
            (False, 1, 1),
        ]:
            want = grain.MapDataset.range(size)
            if shuffle:
                want = want.shuffle(seed=order._seed(seed, stream))
            want = [int(want[i]) for i in range(size)]
            settings = size, shuffle, seed, stream
            # Twice: an order of few numbers is kept.
            for _ in range(2):
                each = order.shuffled(*settings)
                assert [int(each[i]) for i in range(size)] == want
                assert order.indices(*settings).tolist() == want


def test_a_kept_order_is_not_changed():
    found = order.indices(8, True, 0, 1)
    with pytest.raises(ValueError, match="read-only"):
        found.sort()
