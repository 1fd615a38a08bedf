"""A user's script, as it is started on every host.

`two_processes.py DIRECTORY PORT INDEX CASE...`: runs the cases one after the
other, and the first process writes what came of each to `DIRECTORY/CASE.npz`.
The tests call `outcome` for the same in one process.
"""

import collections
import faulthandler
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from unittest import mock

if __name__ == "__main__":
    import tests.distribution.unused  # noqa: F401

import jax
import keras
from jax.experimental import multihost_utils


def begin(port, index, case):
    """Makes this process one of two, with equal seeds."""
    address, rank = f"127.0.0.1:{port}", (2, int(index))
    if case.startswith(("resume", "split")):
        # The other way to start processes: a lost one is noticed sooner.
        jax.distributed.initialize(
            address, *rank, heartbeat_timeout_seconds=10
        )
        keras.utils.set_random_seed(0)
    else:
        keras.distribution.initialize(address, *rank)


if __name__ == "__main__":
    # A process that crashes writes where.
    faulthandler.enable()
    begin(*sys.argv[2:5])
    # What a process that is killed leaves.
    tempfile.tempdir = sys.argv[1]

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain import _hosts  # noqa: E402
from keras_posttrain.data.batches import pipeline  # noqa: E402
from keras_posttrain.data.rows import parallel  # noqa: E402
from keras_posttrain.data.rows import prepare as preparing  # noqa: E402
from keras_posttrain.data.rows.preparation import Preparation  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from keras_posttrain.distribution.led import Led  # noqa: E402
from keras_posttrain.models import device_transfer, presets  # noqa: E402
from keras_posttrain.models.hf.export import export  # noqa: E402
from keras_posttrain.rl.async_sampler import AsyncSampler  # noqa: E402
from keras_posttrain.rollout.vllm.jobs import EngineFailure  # noqa: E402
from tests.distribution import lost_hosts  # noqa: E402
from tests.distribution.runs import directory as directory_of  # noqa: E402
from tests.distribution.runs import (  # noqa: E402
    filled_adapter,
    make,
    mesh,
    odd,
)
from tests.support import REFERENCE, random_rows  # noqa: E402


def write_programs():
    """Lets this process store the programs that it compiles.

    JAX lets only the first do so, and on CPUs the others have programs of
    their own: a test would compile them each time.
    """
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    def writing(*args, **kwargs):
        index, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = index

    compiler._cache_write = writing


def train(task, family, mode, layout):
    """Trains; a dict of what came of it."""
    keras.distribution.set_distribution(mesh(layout))
    made, fit = make(task, family, mode)
    history = made.fit(**fit, verbose=0).history
    assert made.compiled_train_step._cache_size() == 1, "compiled again"
    out = {k: v for k, v in history.items() if not k.startswith("time/")}
    if task == "episodes":
        rows = made.last_rollout
        out["tokens"] = json.dumps([len(x) for x in rows["turn_rewards"]])
    if task == "grpo":
        rows = made.last_rollout
        out |= {k: rows[k] for k in ("odd", "advantage")}
        out["tokens"] = json.dumps(rows["completion"])
    return out | trained(made)


def use(directory, family, mode, layout):
    """Uses a model in each way and returns a dict of the results."""
    keras.distribution.set_distribution(mesh(layout))
    made, _ = make("sft", family, mode)
    rows = random_rows(5, seed=2)
    out = made.evaluate(rows, batch_size=4)
    out["log_probs"] = np.concatenate(made.log_probs(rows, batch_size=4))
    prompts = [{"prompt_ids": row["token_ids"]} for row in rows]
    kwargs = dict(max_tokens=6, stop_token_ids=None, return_token_ids=True)
    out["tokens"] = made.generate(prompts, seed=3, **kwargs)
    # A seed that all agree on.
    out["sampled"] = made.generate(prompts[0], **kwargs)
    assert processes.exchange(out["sampled"]) == (
        [out["sampled"]] * processes.count()
    )
    del out["sampled"]
    if mode == "lora":
        made.save_adapter(directory / "adapter")
    made.export(directory / "export")
    made.save_to_preset(directory / "preset")
    return out


def trained(task):
    weights = processes.fetch([v.value for v in task.trainable_variables])
    return {f"weight {i}": x for i, x in enumerate(weights)}


class Dies(keras.callbacks.Callback):
    """Ends one process as something else may end it."""

    reads_step_logs = True

    def __init__(self, step, process, how):
        super().__init__()
        self.step, self.process, self.how = step, process, how

    def on_train_batch_begin(self, batch, logs=None):
        step = self._model.step
        if step == self.step and self.process in ("all", processes.index()):
            if self.how == "raise":
                raise OSError("No space left on device")
            os.kill(os.getpid(), getattr(signal, self.how))
        if step > self.step:
            # The others hear of a signal within a second, and of a run of
            # such short steps nothing would be left.
            time.sleep(1)


def resume(directory, mode, layout, *death):
    """A run with checkpoints; `death` is the step, the process and how."""
    keras.distribution.set_distribution(mesh(layout))
    made, _ = make("sft", "llama3-short", mode)
    callbacks = [
        kpt.callbacks.Checkpoint(directory, every=2),
        kpt.callbacks.MetricsLog(directory),
        keras.callbacks.EarlyStopping(
            "loss", patience=2, restore_best_weights=True
        ),
    ]
    if death:
        step, process, how = death
        process = int(process) if process.isdigit() else process
        callbacks.append(Dies(int(step), process, how))
    made.fit(
        random_rows(48, seed=1),
        batch_size=8,
        epochs=2,
        callbacks=callbacks,
        verbose=0,
    )
    assert made.step == 12
    return trained(made)


def split(directory, staleness, *death):
    """GRPO with a trainer and a sampler that have four devices each.

    The reward is the share of tokens below 64. `death` as in `resume`;
    `again1` is another run of staleness 1, in its own folder.
    """
    directory = directory / staleness
    staleness = int(staleness.removeprefix("again"))
    trainer, sampler = kpt.distribution.split(trainer=4, sampler=4)
    keras.distribution.set_distribution(kpt.distribution.fsdp(devices=trainer))
    path = directory_of("llama3-short")
    made = kpt.GRPOTask.from_preset(path, sequence_length=32)
    made.tokenizer = None
    engine = kpt.rollout.NativeRollout(
        distribution=kpt.distribution.tensor_parallel(2, devices=sampler)
    )
    # Adam turns the rounding of small gradients into steps.
    exact, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(1e-2)
    made.compile(
        optimizer=adam if staleness else exact,
        rewards=[low],
        num_generations=8,
        max_completion_length=8,
        rollout=engine,
    )
    callbacks = [
        kpt.callbacks.Checkpoint(directory, every=2),
        kpt.callbacks.MetricsLog(directory),
        Late(),
    ]
    if death:
        step, process, how = death
        callbacks.append(Dies(int(step), int(process), how))
    rows = [{"prompt_ids": x["token_ids"]} for x in random_rows(32, 3, 6)]
    with (
        mock.patch.object(multihost_utils, "sync_global_devices", never),
        mock.patch.object(AsyncSampler, "_sample_round", late),
    ):
        made.fit(
            rows,
            batch_size=4,
            epochs=2,
            max_staleness=staleness,
            callbacks=callbacks,
            verbose=0,
        )
    assert made.step == 16
    return trained(made)


def never(name):
    """In place of a program on the devices of trainer and sampler.

    Two threads may begin it and their own in any order, and if not all
    processes do so in the same one, none ends.
    """
    raise AssertionError(f"a program on all devices: {name}")


class Late(keras.callbacks.Callback):
    """Begins the first steps in process 0 after a rollout, if they overlap."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch < 4 and processes.count() > 1 and processes.is_first():
            time.sleep(0.4)


def late(sampler, sample_round=AsyncSampler._sample_round):
    """Begins the first rollouts in process 1 after a step."""
    if sampler._begun < 6 and not processes.is_first():
        time.sleep(0.2)
    return sample_round(sampler)


def low(completions):
    return [sum(x < 64 for x in ids) / len(ids) for ids in completions]


def raises(pattern, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        assert re.search(pattern, str(error)), error
        return
    raise AssertionError(f"nothing was raised: {pattern}")


def refused(directory):
    """Processes that differ are refused, with the same message in both."""
    path, rows = directory_of("llama3-short"), random_rows(8)
    task = kpt.SFTTask.from_preset(path, sequence_length=64)
    task.compile()
    raises("a distribution over 0 of them", task.fit, rows, verbose=0)
    keras.distribution.set_distribution(mesh("8x1"))
    task = kpt.SFTTask.from_preset(path, sequence_length=64)
    task.compile()
    raises("same data.* data tokens=.* in process 1", task.fit,
           random_rows(8, seed=processes.index()), verbose=0)  # fmt: skip
    raises("epochs=1 in process 0, epochs=2 in process 1", task.fit, rows,
           epochs=1 + processes.index(), verbose=0)  # fmt: skip
    sampled, fit = make("grpo", "llama3-short", "full")
    refuse_streams(task, rows, sampled, **fit)
    names = keras.distribution.list_devices()
    three_each = [*names[:3], *names[4:7]]
    keras.distribution.set_distribution(
        kpt.distribution.fsdp(context=2, devices=three_each)
    )
    uneven = kpt.SFTTask.from_preset(path, sequence_length=64)
    uneven.compile()
    pattern = r"process 0 has \[0, 1\], process 1 has \[1, 2\].*`context`"
    raises(pattern, uneven.fit, rows, verbose=0)
    raises(pattern, uneven.evaluate, rows, verbose=0)
    keras.distribution.set_distribution(mesh("8x1"))
    # Each error comes before anything is sampled.
    raises("a NativeRollout without devices of its own", sampled.fit, **fit,
           max_staleness=1, verbose=0)  # fmt: skip
    raises("8 devices. Use multiples of 2", kpt.distribution.split, trainer=3)
    half = keras.distribution.list_devices()[:4]
    raises("devices of 1 of 2 processes", kpt.rollout.NativeRollout,
           distribution=kpt.distribution.fsdp(devices=half))  # fmt: skip
    rewards = [broken if processes.index() == 1 else odd]
    rewards[0].__name__ = "odd"
    sampled.compile(
        rewards=rewards, num_generations=4, max_completion_length=4
    )
    raises("In process 1 of 2: .*'odd' raised KeyError: 'no such'",
           sampled.fit, **fit, verbose=0)  # fmt: skip
    task, fit = make("episodes", "qwen3-short", "full")
    opponent = kpt.rollout.NativeRollout()
    opponent.set_model(task)
    game = kpt.episodes.Episode(duel, opponents={"second": opponent})
    task.compile(episode=game, num_generations=4, max_completion_length=4)
    raises("'second': NativeRollout}, 2 processes", task.fit, **fit, verbose=0)
    return {}


def refuse_streams(task, rows, sampled, dataset, **given):
    """Streams that differ, from the first row on or later, or that fail."""
    own = processes.index()
    fit = functools.partial(task.fit, batch_size=4, verbose=0)
    different = random_rows(8, seed=own)
    raises("the same stream.* after 0 rows .* 8 rows .hash=.* in process 1",
           fit, lambda: iter(different))  # fmt: skip
    raises("7 rows .* and the end in process 1", task.evaluate,
           lambda: iter(rows[own:]))  # fmt: skip

    def fails():
        yield from rows[: 6 if own else None]
        if own:
            raise OSError("the connection was lost")

    raises("In process 1 of 2: OSError: the connection was lost", fit, fails)
    assert task.step == 0
    with mock.patch.object(pipeline, "WINDOW", 4):
        raises("after 5 rows .* 3 rows .* and the end in process 0, 2 rows ",
               fit, lambda: iter(rows[: 8 - own]))  # fmt: skip
    assert task.step == 1
    raises("the same stream.* 7 rows .* in process 1", sampled.fit,
           lambda: iter(dataset[own:]), **given, verbose=0)  # fmt: skip
    assert sampled.step == 0


async def duel(first, second, word):
    return {first: 0.0, second: 0.0}


def streams(directory):
    """Two epochs of a stream of several windows, in all processes."""
    keras.distribution.set_distribution(mesh("dp"))
    made, fit = make("packed", "qwen2-short", "lora")
    rows, read, prepared = fit.pop("dataset"), [], []

    def rows_of_an_epoch():
        for row in rows:
            read.append(row)
            yield row

    def prepare(self, index, *args, prepare=Preparation._prepare):
        prepared.append(index)
        return prepare(self, index, *args)

    with (
        mock.patch.object(pipeline, "WINDOW", 16),
        mock.patch.object(Preparation, "_prepare", prepare),
    ):
        history = made.fit(rows_of_an_epoch, **fit, verbose=0).history
    # Every process reads all rows, and prepares a share of them.
    assert len(read) == 2 * len(rows)
    share = range(processes.index(), len(rows), processes.count())
    assert prepared == 2 * [*share]
    report = made.data_report.counts()
    assert report["rows"] == len(rows)
    return trained(made) | {
        "loss": history["loss"],
        "report": json.dumps(report),
    }


def shares(directory):
    """Each process tokenizes a share of the rows, and has all of them."""
    cache = directory / f"cache{processes.index()}"
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=48, truncation="drop"
    )
    rows = [{"text": f"{i} and {i} make {2 * i}."} for i in range(3000)]
    rows[2800] = {"text": 100 * "long "}
    read, prepared = [], parallel._answers

    def answers(parts, *args):
        for part in prepared(parts, *args):
            read.append([part[0], len(part[1])])
            yield part

    def prepare():
        read.clear()
        with processes.shared_rows():
            return task.prepare(rows)

    is_shared = processes.count() > 1
    with (
        mock.patch.dict(os.environ, {"KERAS_POSTTRAIN_CACHE": str(cache)}),
        mock.patch.object(parallel, "_answers", answers),
        # One process stores them however soon they are prepared.
        mock.patch.object(preparing, "PATIENCE", 0),
    ):
        examples, report = prepare()
        found = processes.exchange(read)
        if is_shared:
            assert [len(some) for some in found] == [6, 6]
            starts = range(0, 3000, 256)
            every = [[start, min(256, 3000 - start)] for start in starts]
            assert sorted(sum(found, [])) == every
        again, report_again = prepare()
        assert not read and again.digest == examples.digest
        assert report_again.counts() == report.counts()
        # One process that lacks them is not left alone with them.
        if processes.index() == 1:
            shutil.rmtree(cache)
        again, _ = prepare()
        assert len(read) == 6 * is_shared and again.digest == examples.digest
        rows[2900] = {"text": 5}
        raises("row 2900 of `dataset`", prepare)
    tokens = np.concatenate([x.token_ids for x in examples])
    return {"tokens": tokens, "report": json.dumps(report.counts())}


def broken(completions):
    raise KeyError("no such")


def raised(function, *args):
    """The class and the text of what a function raises."""
    try:
        function(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was raised")


def led(directory):
    """Work of the first process, which the others help: results, errors."""
    own, done = Led(EngineFailure), []
    values = {"a": over_all(np.arange(8.0)), "b": over_all(np.arange(16.0))}

    def arrays(names):
        for name in names:
            done.append(name)
            yield name, device_transfer.to_host(values[name])

    def breaks(process):
        if processes.index() == process:
            raise KeyError("broken")
        return ()

    own.add("arrays", arrays)
    own.add("breaks", breaks)

    def write(names, error=None):
        found = {}
        for name, array in own.together("arrays", names):
            found[name] = array.tolist()
            if error is not None:
                raise error
        return found

    def help_from(process):
        collections.deque(own.together("breaks", process), 0)
        return write("a")

    both = {name: list(range(n)) for name, n in (("a", 8), ("b", 16))}
    assert own.run(lambda: write("ab")) == both
    # The first process stops in the middle of what all gather.
    for error, name in (
        (EngineFailure("it has ended"), "EngineFailure"),
        (OSError("No space left"), "OSError"),
    ):
        done.clear()
        found = raised(own.run, functools.partial(write, "ab", error))
        assert found == [name, str(error)] and done == ["a", "b"], found
    # Of an unknown class where it is raised, named in the others.
    for process in range(processes.count()):
        found = raised(own.run, functools.partial(help_from, process))
        expected = ["RuntimeError", "KeyError: 'broken'"]
        if processes.index() == process:
            expected = ["KeyError", "'broken'"]
        assert found == expected, found
    # All still take part.
    assert own.run(lambda: write("a")) == {"a": both["a"]}
    # Without devices.
    channel = _hosts.Channel("of this test")
    with channel.used():
        big = json.dumps([processes.index()] * 1_000_000)
        for k, text in enumerate(processes.exchange(big)):
            assert text == json.dumps([k] * 1_000_000)
    return {}


def busy(directory):
    """Small arrays are exchanged while programs of all devices run."""
    axis = jax.sharding.PartitionSpec("process", "device")
    shape = 2, jax.local_device_count()
    devices = np.array(jax.devices()).reshape(shape)
    layout = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("process", "device")), axis
    )

    def gathers(x):
        # Between the same pairs of devices as an exchange.
        def turn(i, x):
            return jax.lax.all_gather(x, "process").mean(axis=0) + 1

        return jax.lax.fori_loop(0, 50, turn, x)

    program = jax.jit(
        jax.shard_map(
            gathers,
            mesh=layout.mesh,
            in_specs=axis,
            out_specs=axis,
            check_vma=False,
        )
    )
    x = jax.make_array_from_callback(
        shape, layout, lambda index: np.zeros(shape, "float32")[index]
    )
    # As accelerators do it, whose programs are in order, while all are idle.
    with mock.patch.object(_hosts, "_channel_to_use", lambda: None):
        own = np.arange(5, dtype="int32") + processes.index()
        both = [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
        assert _hosts.gather(own).tolist() == both
        for process in range(2):
            assert _hosts.broadcast(own, process).tolist() == both[process]
    for k in range(30):
        x = program(x)
        assert processes.exchange(["x" * k]) == 2 * [["x" * k]], k
    found = processes.fetch(x)
    assert (found == 30 * 50).all(), found
    return {}


def over_all(array):
    """An array whose rows are split over the devices of all processes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    layout = jax.sharding.PartitionSpec("data")
    return jax.make_array_from_callback(
        array.shape,
        jax.sharding.NamedSharding(mesh, layout),
        lambda index: array[index],
    )


def lost(directory):
    lost_hosts.check(directory)
    return {}


def vllm(directory):
    """Where vLLM cannot serve all processes, all say so."""
    keras.distribution.set_distribution(mesh("8x1"))
    path = directory_of("llama3-short")
    task = kpt.SFTTask.from_preset(path, sequence_length=64)

    def start(**settings):
        engine = kpt.rollout.VLLMRollout(**settings)
        engine.set_model(task)
        return raised(engine.start)

    name, text = start()
    assert name == "ValueError" and "pass `url`, `urls` or `python`" in text
    urls = [f"http://127.0.0.1:{9 + processes.index()}"]
    name, text = start(urls=urls)
    assert "VLLMRollout(urls=...)=['http://127.0.0.1:9'] in" in text, text
    found = start(urls=["http://127.0.0.1:9"], timeout=0.1)
    assert found[0] == "RuntimeError", found
    assert "vLLM did not start. No server answered at http" in found[1], found
    assert processes.exchange(found) == processes.count() * [found]
    return {}


def files(directory):
    """Loads and writes a model, each process its own shards."""
    keras.distribution.set_distribution(mesh("4x2"))
    model = presets.load_causal_lm(REFERENCE / "models/gemma2")
    adapter = filled_adapter(model)
    export(model, directory / "plain", max_shard_bytes=100_000)
    values = adapter.merged_values()
    export(model, directory / "merged", values=values)
    adapter.save(directory / "adapter")
    adapter.load(directory / "adapter")
    presets.save_to_preset(model, directory / "preset")
    again = presets.load_causal_lm(directory / "preset")
    for one, other in zip(model.variables, again.variables, strict=True):
        pairs = zip(
            one.value.addressable_shards, other.value.addressable_shards
        )
        for x, y in pairs:
            assert (np.asarray(x.data) == np.asarray(y.data)).all(), one.path
    if processes.count() > 1:
        # Where the first process cannot write, no process waits for it.
        blocked = directory / "a file"
        if processes.is_first():
            blocked.write_text("x")
        try:
            export(model, blocked)
        except (ValueError, OSError) as error:
            first = type(error) is ValueError
            assert first == processes.is_first(), error
        else:
            raise AssertionError("nothing was raised")
    return {}


KINDS = {
    f.__name__: f
    for f in (
        use, resume, split, refused, files, led, busy, lost, shares, streams,
        vllm,
    )
}  # fmt: skip


def outcome(case, directory):
    """Runs `kind:arguments`; a dict of what came of it."""
    kind, *arguments = case.split(":")
    if kind == "train":
        return train(*arguments)
    # A run that is resumed has one folder, however it was ended.
    (directory / kind).mkdir(exist_ok=True)
    return KINDS[kind](directory / kind, *arguments)


def main(directory, cases):
    for case in cases:
        print(f"{time.strftime('%X')} {case}", flush=True)
        found = outcome(case, directory)
        if processes.is_first():
            np.savez(directory / f"{case}.npz", **found)
    print("done", flush=True)


if __name__ == "__main__":
    write_programs()
    main(pathlib.Path(sys.argv[1]), sys.argv[4:])
