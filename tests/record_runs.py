"""Records a fixed set of runs bit for bit, and compares two records.

```
python tests/record_runs.py record before.json [--only REGEX] [--jobs 2]
    [--cache FOLDER]
python tests/record_runs.py compare before.json after.json [--only REGEX]
```

It uses the public API alone, so that one script runs on two versions of the
package. `PYTHONPATH` says which one is recorded: `PYTHONPATH=/a/checkout
python tests/record_runs.py record a.json`. Of every run the record holds the
metrics log without times, the history, and SHA-256 sums of the trained
weights and of the optimizer's state; of plans the numbers. `compare` prints
each difference and exits with 1 where there is one. A record that was cut off
resumes where it stopped when it is started again.

Runs named `mesh/...` and `plan/...` run on eight simulated devices, the
others on one.
"""

import argparse
import concurrent.futures
import functools
import gc
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback

RUNS = {}
# As sure as can be that sums are made in the same order.
FLAGS = "--xla_cpu_multi_thread_eigen=false"
EIGHT = "--xla_force_host_platform_device_count=8"
NOT_COMPARED = ("time/", "tokens_per_second")


# What the package is imported for is imported in workers alone: the parent
# starts them with the right environment.


def recorded(name, function=None, /, *args, **kwargs):
    """Adds a run: a function that returns something JSON can hold."""
    if function is None:
        return lambda f: recorded(name, f)
    assert name not in RUNS, name
    RUNS[name] = functools.partial(function, *args, **kwargs)
    return function


def environment(devices):
    flags = FLAGS if devices == 1 else f"{FLAGS} {EIGHT}"
    return {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "KERAS_POSTTRAIN_CACHE": "off",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONHASHSEED": "0",
    }


# --- Recording ---------------------------------------------------------------


def record(path, only, jobs, cache):
    """Runs what is not in `<path>.part` yet, where workers add their runs."""
    load_runs()
    names = [n for n in RUNS if re.search(only, n)]
    part = pathlib.Path(f"{path}.part")
    done = recorded_in(part)
    left = [n for n in names if "error" in done.get(n, {"error": "none"})]
    single = [n for n in left if not n.startswith(("mesh/", "plan/"))]
    mesh = [n for n in left if n.startswith("mesh/")]
    plan = [n for n in left if n.startswith("plan/")]
    parts = [(mesh, 8), (plan, 8)]
    parts += [(single[i::4], 1) for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        calls = [
            pool.submit(run_worker, names, devices, part, cache)
            for names, devices in parts
            if names
        ]
        for call in calls:
            call.result()
    done = recorded_in(part)
    found = {n: done.get(n, {"error": "the worker died"}) for n in names}
    pathlib.Path(path).write_text(json.dumps(found, indent=1) + "\n")
    failed = [n for n in names if "error" in found[n]]
    print(f"{len(names)} runs, {len(failed)} failed: {failed}")
    if not failed:
        part.unlink()
    return 1 if failed else 0


def recorded_in(part):
    lines = part.read_text().splitlines() if part.exists() else []
    return {k: v for line in lines for k, v in json.loads(line).items()}


def run_worker(names, devices, part, cache):
    with tempfile.TemporaryDirectory() as programs:
        done = subprocess.run(
            [sys.executable, __file__, "worker", str(part), *names],
            env={
                **os.environ,
                **environment(devices),
                "JAX_COMPILATION_CACHE_DIR": cache or programs,
            },
        )
    if done.returncode:
        print(f"a worker ended with {done.returncode}", flush=True)


def worker(out, names):
    import jax
    import keras

    load_runs()
    with open(out, "a") as file:
        for name in names:
            start = time.monotonic()
            keras.utils.clear_session()
            keras.utils.set_random_seed(0)
            keras.distribution.set_distribution(None)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = RUNS[name](pathlib.Path(folder))
            except Exception:
                traceback.print_exc()
                found = {"error": traceback.format_exc()[-2000:]}
            file.write(json.dumps({name: found}) + "\n")
            file.flush()
            jax.clear_caches()
            gc.collect()
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)


def digest(value):
    """`[SHA-256 of the bits, norm]` of an array; the norm is to read."""
    import numpy as np

    value = np.ascontiguousarray(value)
    head = f"{value.dtype} {value.shape} ".encode()
    found = hashlib.sha256(head + value.tobytes()).hexdigest()
    number = value.astype("float64") if value.size else np.zeros(1)
    return [found, float(np.linalg.norm(number.ravel()))]


def digests(variables):
    """By path; of two like paths the later one has a number."""
    found = {}
    for v in variables:
        path = v.path
        while path in found:
            path += "+"
        found[path] = digest(v.value)
    return found


def plain(value):
    """Makes values that JSON stores exactly, floats included."""
    import numpy as np

    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray) and value.size > 1:
        return digest(value)
    if hasattr(value, "item"):
        return value.item()
    return value


# --- Comparing ---------------------------------------------------------------


def compare(first, second, only):
    first = json.loads(pathlib.Path(first).read_text())
    second = json.loads(pathlib.Path(second).read_text())
    rows, equal = [], 0
    for name in dict.fromkeys([*first, *second]):
        if not re.search(only, name):
            continue
        if name not in first or name not in second:
            rows.append((name, "the run", name in first, name in second))
            continue
        before = len(rows)
        differences(name, first[name], second[name], rows)
        equal += before == len(rows)
    if rows:
        names = ("run", "what", "first", "second")
        cells = [names, *[tuple(short(x) for x in row) for row in rows]]
        widths = [max(map(len, column)) for column in zip(*cells)]
        for row in cells:
            line = (x.ljust(w) for x, w in zip(row, widths))
            print("  ".join(line).rstrip())
    differ = len({row[0] for row in rows})
    print(f"{equal} runs are equal, {differ} differ")
    return 1 if rows else 0


def short(value):
    text = str(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:28] + " .. " + text[-28:]


def differences(name, first, second, rows):
    if "error" in first or "error" in second:
        rows.append((name, "error", first.get("error"), second.get("error")))
        return
    for key in dict.fromkeys([*first, *second]):
        ours, theirs = first.get(key), second.get(key)
        if key.startswith("arrays/"):
            # By their bits alone: names and order are no numbers.
            if bits(ours) != bits(theirs):
                rows.append((name, key, *unlike_arrays(ours, theirs)))
        elif ours != theirs:
            rows.append((name, *unlike(key, ours, theirs)))


def bits(arrays):
    return sorted(sha for sha, _ in arrays.values()) if arrays else None


def unlike_arrays(ours, theirs):
    if ours is None or theirs is None or len(ours) != len(theirs):
        return tuple("none" if x is None else len(x) for x in (ours, theirs))
    if set(ours) != set(theirs):
        # Other names: in order, as they are.
        theirs = dict(zip(ours, theirs.values()))
    other = [k for k in ours if ours[k][0] != theirs[k][0]]
    k = other[0]
    return (
        f"{k}: norm {ours[k][1]!r}",
        f"{theirs[k][1]!r}; {len(other)} of {len(ours)} differ",
    )


def unlike(key, ours, theirs):
    """The first place where two values differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for k in dict.fromkeys([*ours, *theirs]):
            if k not in ours or k not in theirs:
                return f"{key}.{k}", ours.get(k), theirs.get(k)
            if ours[k] != theirs[k]:
                return unlike(f"{key}.{k}", ours[k], theirs[k])
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{key}: length", len(ours), len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs)):
            if a != b:
                return unlike(f"{key}[{i}]", a, b)
    return key, ours, theirs


# --- The runs ----------------------------------------------------------------


def load_runs():
    """Fills `RUNS`."""
    import grain
    import jax.numpy as jnp
    import keras
    import keras_hub
    import numpy as np
    import optax

    import keras_posttrain as kpt

    losses = kpt.losses
    reference = pathlib.Path(kpt.__file__).parents[1] / "tests/reference"
    models, adapters = reference / "models", reference / "adapters"
    llama, llama_ref = models / "llama3", models / "llama3_ref"
    qwen, qwen_ref = models / "qwen3", models / "qwen3_ref"

    def read(name):
        return json.loads((reference / name).read_text(encoding="utf-8"))

    def random_rows(count, low=6, high=30, seed=0):
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(count):
            n = int(rng.integers(low, high + 1))
            ids = rng.integers(3, 500, n).tolist()
            mask = [0] * (n // 3) + [1] * (n - n // 3)
            rows.append({"token_ids": ids, "completion_mask": mask})
        return rows

    rows = random_rows(10, seed=1)
    pairs = read("dpo.json")["datasets"]["llama3"][:6]
    labelled = [
        {k: row[k] for k in ("prompt_ids", "completion_ids", "label")}
        for row in read("kto.json")["datasets"]["llama3"][:6]
    ]
    scored = read("reward.json")["datasets"]["plain"][:6]
    completions = [
        {
            "prompt_ids": r["token_ids"][:6],
            "completion_ids": r["token_ids"][6:],
        }
        for r in random_rows(6, low=9)
    ]
    context = [
        {**r, "teacher_prompt_ids": [5, 6, 7] + r["prompt_ids"]}
        for r in completions
    ]
    prompts = [
        {"prompt_ids": r["token_ids"]} for r in random_rows(8, 4, 6, seed=2)
    ]

    def odd(completions):
        return [sum(x % 2 for x in ids) / len(ids) for ids in completions]

    def uneven_reward(completions, prompt_ids):
        return [
            r * (ids[0] % 2) for r, ids in zip(odd(completions), prompt_ids)
        ]

    def lora(**settings):
        return kpt.LoRA(**{"rank": 4, "alpha": 8, **settings})

    def spread_b(task):
        """B is 0 at the start, and then half of the gradients are."""
        rng = np.random.default_rng(0)
        for v in task.trainable_variables:
            if v.path.endswith("lora_b"):
                v.assign(rng.normal(0, 0.05, v.shape).astype("float32"))

    class Killed(Exception):
        pass

    class Kill(keras.callbacks.Callback):
        def __init__(self, at):
            super().__init__()
            self.at, self.seen = at, 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == self.at:
                raise Killed

    def fitted(
        folder, make, dataset, *, stages=None, dies_at=None, after=None, **fit
    ):
        """Trains, and records what came of it.

        With `stages`, numbers of epochs, the run is resumed from its
        checkpoint for each; with `dies_at` it is killed after that step.
        """
        once = fit.pop("epochs", 2)
        epochs = stages or (once,)
        if dies_at:
            epochs = (epochs[-1], epochs[-1])
        callbacks = list(fit.pop("callbacks", ()))
        for i, count in enumerate(epochs):
            task = make()
            added = [kpt.callbacks.MetricsLog(folder), *callbacks]
            if len(epochs) > 1:
                added.append(kpt.callbacks.Checkpoint(folder, every=2))
            if dies_at and i == 0:
                added.append(Kill(dies_at))
            try:
                history = task.fit(
                    dataset,
                    epochs=count,
                    callbacks=added,
                    **{"batch_size": 4, "verbose": 0, **fit},
                ).history
            except Killed:
                continue
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in lines]
        found = {
            "log": [untimed(line) for line in lines],
            "history": plain(untimed(history)),
            "step": task.step,
            "arrays/weights": digests(task.trainable_variables),
            "arrays/optimizer": digests(task.optimizer.variables),
        }
        return found | (plain(after(task)) if after else {})

    def untimed(line):
        return {
            k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)
        }

    def made(
        kind,
        preset=llama,
        *,
        compiled=None,
        b=False,
        tokens=True,
        adapter=None,
        rate=1e-3,
        **kwargs,
    ):
        """A function that makes a task and compiles it."""

        def make():
            keras.utils.set_random_seed(0)
            task = kind.from_preset(
                preset, **{"sequence_length": 64, **kwargs}
            )
            if adapter is not None:
                task.load_adapter(adapter)
            if b:
                spread_b(task)
            if not tokens:
                task.tokenizer = None
            settings = dict(compiled or {})
            optimizer = settings.pop("optimizer", None)
            if optimizer is None:
                optimizer = keras.optimizers.AdamW
            task.compile(optimizer(rate), **settings)
            return task

        return make

    # SFT

    def sft(name, fit=None, dataset=rows, **settings):
        def run(folder):
            make = made(settings.pop("kind", kpt.SFTTask), **settings)
            return fitted(folder, make, dataset, **(fit or {}))

        recorded(f"sft/{name}", run)

    dropout = {"lora": lora(dropout=0.2), "b": True}
    sft("full")
    sft("lora", lora=lora(rslora=True))
    sft("lora_dropout", **dropout)
    sft("micro", compiled={"micro_batch_size": 2}, **dropout)
    sft("uneven", {"batch_size": 5}, compiled={"micro_batch_size": 2})
    sft("bfloat16", dtype="bfloat16")
    sft("mixed_bfloat16", dtype="mixed_bfloat16")
    sft("packed", {"packing": True, "batch_size": 2}, preset=models / "gemma2")
    sft(
        "packed_micro",
        {"packing": True, "batch_size": 2},
        compiled={"micro_batch_size": 1},
        **dropout,
    )
    sft("remat_chunks", remat="full", chunk_size=7, preset=models / "gemma2")
    sft("dft", compiled={"loss": losses.DFTLoss()}, preset=qwen)
    sft("optax", compiled={"optimizer": optax.adamw})
    sft(
        "schedule",
        compiled={
            "optimizer": lambda rate: keras.optimizers.SGD(
                keras.optimizers.schedules.CosineDecay(rate, 4), momentum=0.9
            )
        },
    )
    sft("weights", dataset=[dict(r, weight=i % 3) for i, r in enumerate(rows)])
    sft("skipped_steps", {"skip_steps": (2,)})
    sft("validated", {"validation_data": random_rows(5, seed=3)}, **dropout)
    stream = grain.MapDataset.source(rows).to_iter_dataset()
    sft("streamed", dataset=stream)
    sft("streamed_packed", {"packing": True, "batch_size": 2}, dataset=stream)
    sft("stopped_and_resumed", {"stages": (1, 2)}, **dropout)
    sft("killed", {"dies_at": 4, "epochs": 2}, **dropout)
    sft("killed_stream", {"dies_at": 2, "epochs": 2}, dataset=stream)
    sft(
        "killed_packed",
        {"dies_at": 2, "epochs": 2, "packing": True, "batch_size": 2},
        dtype="bfloat16",
    )

    class SharpnessAware(kpt.SFTTask):
        def train_step(self, state, batch):
            gradients, _ = self.loss_and_gradients(state, batch)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
            uphill = [
                w + 0.05 * g / (norm + 1e-12)
                for w, g in zip(state["trainable"], gradients)
            ]
            gradients, logs = self.loss_and_gradients(
                {**state, "trainable": uphill}, batch
            )
            return self.apply_gradients(state, gradients, logs)

    class Squared(losses.Loss):
        def normalizers(self, batch):
            return {"loss": batch["completion_mask"].sum()}

        def total(self, batch, outputs):
            logps = outputs["per_token_logps"]
            return {"loss": (batch["completion_mask"] * logps**2).sum()}, {}

    sft("own_step", kind=SharpnessAware, rate=1e-4)
    sft("own_loss", compiled={"loss": Squared(), "micro_batch_size": 2})
    chat = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + 2?"},
                {"role": "assistant", "content": f"It is {i + 2}."},
            ]
        }
        for i in range(4)
    ]
    sft("chat", dataset=chat, preset=qwen, sequence_length=256)

    @recorded("sft/used")
    def used(folder):
        def after(task):
            task.save_adapter(folder / "adapter")
            task.export(folder / "model")
            files = [*folder.glob("adapter/*"), *folder.glob("model/*")]
            sampled = {"max_tokens": 6, "return_token_ids": True}
            return {
                "evaluate": task.evaluate(rows, 3),
                "log_probs": task.log_probs(rows, 3),
                "greedy": task.generate(
                    prompts[:3], temperature=0, stop_token_ids=None, **sampled
                ),
                "samples": task.generate(
                    prompts[:3], seed=3, num_generations=3, **sampled
                ),
                "top": task.generate(
                    prompts[:2], seed=3, top_k=20, top_p=0.9, **sampled
                ),
                "text": task.generate(["one two"], seed=1, max_tokens=6),
                "files": {
                    str(f.relative_to(folder)): hashlib.sha256(
                        f.read_bytes()
                    ).hexdigest()
                    for f in sorted(files)
                    if f.suffix == ".safetensors"
                },
            }

        make = made(kpt.SFTTask, qwen, **dropout)
        return fitted(folder, make, rows, epochs=1, after=after)

    @recorded("sft/without_packing_family")
    def plain_path(folder):
        def make():
            keras.utils.set_random_seed(0)
            backbone = keras_hub.models.GPT2Backbone(
                vocabulary_size=512,
                num_layers=2,
                num_heads=2,
                hidden_dim=16,
                intermediate_dim=24,
                dropout=0.0,
                max_sequence_length=64,
            )
            lm = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
            task = kpt.SFTTask(lm, sequence_length=64)
            task.compile(keras.optimizers.AdamW(1e-3))
            return task

        def after(task):
            greedy = {"temperature": 0, "max_tokens": 5}
            greedy |= {"return_token_ids": True, "stop_token_ids": None}
            return {
                "log_probs": task.log_probs(rows, 3),
                "greedy": task.generate(prompts[:2], **greedy),
            }

        return fitted(folder, make, rows, after=after)

    # Preferences

    def dpo(name, fit=None, dataset=pairs, loss="auto", cache=False, **given):
        def run(folder):
            settings = dict(given)
            compiled = {"loss": loss, **settings.pop("compiled", {})}
            if cache:
                compiled["reference_cache"] = folder / "cache"
            make = made(kpt.DPOTask, compiled=compiled, **settings)

            def after(task):
                return {"evaluate": task.evaluate(dataset, 4)}

            fit_settings = {"batch_size": 3, "after": after, **(fit or {})}
            return fitted(folder, make, dataset, **fit_settings)

        recorded(f"preferences/{name}", run)

    other = {"reference": llama_ref, **dropout}
    dpo("dpo_lora", lora=lora(dropout=0.2))
    dpo("dpo_full", rate=1e-5)
    dpo("dpo_reference", **other)
    dpo(
        "dpo_adapter_copy", lora=None, adapter=adapters / "llama3_lora_r4_init"
    )
    dpo("dpo_cached", cache=True, **other)
    dpo("dpo_full_cached", cache=True, rate=1e-5)
    dpo("dpo_packed", {"packing": True}, **other)
    dpo("dpo_shared", {"share_prefix": True}, **other)
    dpo(
        "dpo_cached_packed_shared",
        {"packing": 96, "share_prefix": True},
        cache=True,
        compiled={"micro_batch_size": 1},
        **other,
    )
    dpo("dpo_micro", compiled={"micro_batch_size": 2}, **other)
    dpo(
        "dpo_gemma2",
        {"share_prefix": True},
        preset=models / "gemma2",
        rate=1e-5,
    )
    dpo(
        "dpo_follows",
        {"callbacks": [kpt.callbacks.UpdateReference(every=2, mixup=0.5)]},
        lora=lora(),
    )
    dpo("dpo_resumed", {"stages": (1, 2)}, **other)
    dpo("dpo_killed", {"dies_at": 3, "epochs": 2}, rate=1e-5)
    dpo("ipo", loss=losses.IPOLoss(), **other)
    dpo("simpo", loss=losses.SimPOLoss(), **dropout)
    dpo(
        "orpo", {"share_prefix": True, "packing": True},
        loss=losses.ORPOLoss(), **dropout,
    )  # fmt: skip
    dpo("orpo_separate", loss=losses.ORPOLoss())
    dpo(
        "aot_micro",
        {"batch_size": 5},
        loss=losses.AOTLoss(paired=False),
        compiled={"micro_batch_size": 2},
        **other,
    )
    dpo(
        "sum",
        loss=losses.SumLoss([losses.DPOLoss(), losses.CPOLoss()], [1.0, 0.1]),
        **other,
    )
    kto = {"dataset": labelled, "loss": losses.KTOLoss(), **other}
    dpo("kto", {"batch_size": 6}, **kto)
    dpo(
        "kto_micro", {"batch_size": 6}, compiled={"micro_batch_size": 2}, **kto
    )
    dpo(
        "kto_micro_packed_shared",
        {"batch_size": 6, "packing": 96, "share_prefix": True},
        compiled={"micro_batch_size": 1},
        **kto,
    )
    dpo(
        "apo_unpaired_cached",
        cache=True,
        **{**kto, "loss": losses.APOZeroUnpairedLoss()},
    )

    def reward(name, fit=None, **given):
        def run(folder):
            make = made(kpt.RewardTask, models / "qwen3_reward", **given)

            def after(task):
                texts = [
                    {"token_ids": r["chosen_ids"], "completion_mask": [1] * n}
                    for r in scored
                    for n in [len(r["chosen_ids"])]
                ]
                return {
                    "score": task.score(texts, batch_size=4),
                    "evaluate": task.evaluate(scored, 4),
                }

            settings = {"batch_size": 3, "after": after, **(fit or {})}
            return fitted(folder, make, scored, **settings)

        recorded(f"reward/{name}", run)

    reward("full")
    reward("lora", **dropout)
    reward(
        "micro_packed_shared",
        {"packing": True, "share_prefix": True},
        compiled={"micro_batch_size": 1},
        **dropout,
    )
    reward("resumed", {"stages": (1, 2)}, **dropout)

    # Reinforcement

    def rl(name, kind, fit=None, dataset=prompts, *, after=None, **given):
        def run(folder):
            settings = dict(given)
            compiled = {
                "rewards": [odd],
                "max_completion_length": 6,
                **settings.pop("compiled", {}),
            }
            settings = {"preset": qwen, "tokens": False, **settings}
            make = made(kind, compiled=compiled, **settings)

            def table(task):
                found = {"last_rollout": task.last_rollout}
                return found | (after(task) if after else {})

            fit_settings = {"after": table, "epochs": 1, **(fit or {})}
            return fitted(folder, make, dataset, **fit_settings)

        recorded(name, run)

    def grpo(name, fit=None, loss=None, compiled=None, **given):
        settings = {
            "loss": loss or losses.GRPOLoss(beta=0.1, entropy_coef=0.01),
            "num_generations": 4,
            "stop_token_ids": range(3, 60),
            **(compiled or {}),
        }
        rl(f"grpo/{name}", kpt.GRPOTask, fit, compiled=settings, **given)

    def ppo(name, fit=None, compiled=None, **given):
        settings = {"num_generations": 2, "num_iterations": 1}
        settings |= {"stop_token_ids": range(3, 60), **(compiled or {})}
        rl(f"ppo/{name}", kpt.PPOTask, fit, compiled=settings, **given)

    several = {"num_minibatches": 2, "num_iterations": 2}
    grpo("separate", **dropout)
    grpo("full", rate=1e-4)
    grpo("micro", compiled={"micro_batch_size": 4}, **dropout)
    grpo("packed", {"packing": True}, **dropout)
    grpo("shared", {"share_prefix": True}, **dropout)
    grpo(
        "packed_shared_micro",
        {"packing": 24, "share_prefix": True},
        compiled={"micro_batch_size": 1},
        **dropout,
    )
    grpo("updates", compiled=several, lora=lora())
    grpo(
        "updates_of_rollout",
        compiled={**several, "old_log_probs": "rollout"},
        lora=lora(),
    )
    grpo("reference", lora=lora(), reference=qwen_ref)
    grpo(
        "reference_follows",
        {"callbacks": [kpt.callbacks.UpdateReference(every=1, mixup=1.0)]},
        lora=lora(),
    )
    grpo("no_divergence", loss=losses.DAPOLoss(), lora=lora())
    grpo("sequences", loss=losses.GSPOLoss(), lora=lora(), compiled=several)
    grpo("dr", loss=losses.DrGRPOLoss(), lora=lora())
    grpo("cispo", loss=losses.CISPOLoss(), lora=lora(), compiled=several)
    grpo(
        "rloo",
        loss=losses.ReinforceLoss(),
        compiled={"advantages": losses.LeaveOneOutAdvantages(beta=0.5)},
        lora=lora(),
    )
    grpo(
        "resampled",
        compiled={"rewards": [uneven_reward], "max_resamples": 3},
        lora=lora(),
    )
    grpo(
        "masked",
        compiled={"mask_truncated_completions": True, "micro_batch_size": 2},
        lora=lora(),
    )
    grpo("skipped_steps", {"skip_steps": (1,)}, lora=lora())
    grpo(
        "validated",
        {"validation_data": prompts[:3], "validation_generations": 2},
        lora=lora(),
        after=lambda task: {
            "evaluate": task.evaluate(prompts, 4, num_generations=2)
        },
    )
    grpo(
        "killed",
        {"dies_at": 3, "epochs": 2},
        compiled={"num_minibatches": 2},
        **dropout,
    )
    grpo("resumed", {"stages": (1, 2)}, lora=lora(), compiled=several)
    texts = [
        {"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(4)
    ]
    grpo(
        "texts",
        dataset=texts,
        tokens=True,
        lora=lora(),
        compiled={
            "rewards": [
                kpt.rewards.LengthReward(minimum=4),
                kpt.rewards.RegexReward(r"[aeiou]"),
            ],
            "reward_weights": [1.0, 0.5],
            "stop_token_ids": "auto",
        },
    )

    @recorded("grpo/overlapped")
    def overlapped(folder):
        # With weights that stay, samples are those of taking turns.
        compiled = {
            "rewards": [odd],
            "max_completion_length": 6,
            "num_generations": 2,
            "loss": losses.GRPOLoss(),
        }
        make = made(
            kpt.GRPOTask, qwen, compiled=compiled, lora=lora(), tokens=False,
            rate=0.0,
        )  # fmt: skip
        found = fitted(folder, make, prompts, max_staleness=1, batch_size=2)
        log = [{k: x[k] for k in ("step", "reward")} for x in found["log"]]
        return {"log": log, "arrays/weights": found["arrays/weights"]}

    ppo("own_head", **dropout)
    ppo("full", rate=1e-4)
    ppo("own_backbone", compiled={"value_model": qwen_ref}, lora=lora())
    ppo(
        "own_backbone_full",
        compiled={"value_model": qwen_ref, "kl_in": "loss"},
        rate=1e-4,
        reference=qwen_ref,
    )
    ppo("micro", compiled={"micro_batch_size": 2, **several}, **dropout)
    ppo("packed", {"packing": 24}, compiled={"gamma": 0.9}, **dropout)
    ppo("shared", {"share_prefix": True}, compiled=several, **dropout)
    ppo("killed", {"dies_at": 2, "epochs": 2}, lora=lora())
    ppo("resumed", {"stages": (1, 2)}, lora=lora(), compiled=several)

    # Distillation

    def distill(
        name, loss="auto", dataset=rows, fit=None, cache=None, **given
    ):
        def run(folder):
            settings = {"teacher": llama_ref, **given}
            compiled = {"loss": loss, **settings.pop("compiled", {})}
            if cache:
                compiled |= {"teacher_cache": folder / "cache", "top_k": cache}
            make = made(kpt.DistillTask, compiled=compiled, **settings)
            fit_settings = {"epochs": 2, **(fit or {})}
            return fitted(folder, make, dataset, **fit_settings)

        recorded(f"distill/{name}", run)

    def evaluated(task):
        return {"evaluate": task.evaluate(rows, 4)}

    mixed = losses.ForwardKLLoss(temperature=2.0, alpha=0.5)
    hidden = losses.SumLoss(
        [losses.SkewKLLoss(), losses.HiddenStateLoss()], [1.0, 0.3]
    )
    attention = losses.SumLoss([losses.SFTLoss(), losses.AttentionLoss()])
    distill("full", fit={"after": evaluated})
    distill("mixed", mixed, **dropout)
    distill("mixed_packed", mixed, fit={"packing": True}, **dropout)
    distill("mixed_micro", mixed, compiled={"micro_batch_size": 2}, **dropout)
    distill("cached", mixed, cache=8, fit={"after": evaluated}, **dropout)
    distill("cached_packed", cache=16, fit={"packing": True}, **dropout)
    distill("hidden", hidden, **dropout)
    distill("hidden_packed", hidden, fit={"packing": True})
    distill("attention", attention, compiled={"micro_batch_size": 2})
    distill("teacher_prompts", losses.ReverseKLLoss(), context, **dropout)
    distill(
        "teacher_prompts_of_itself", losses.ReverseKLLoss(), context,
        {"packing": True}, teacher=None, lora=lora(),
    )  # fmt: skip
    distill("itself_full", dataset=context, teacher=None, rate=1e-4)
    distill(
        "several",
        losses.JSDLoss(),
        compiled={"teacher_weights": [0.75, 0.25]},
        teacher=[llama_ref, None],
        **dropout,
    )
    distill(
        "by_column",
        losses.TotalVariationLoss(),
        [{**r, "who": "ab"[i % 2]} for i, r in enumerate(rows)],
        {"packing": 48},
        compiled={"teacher_column": "who"},
        teacher={"a": llama_ref, "b": None},
        **dropout,
    )
    words = [
        {"prompt": "What is 2 + 2? ", "completion": "It is four, I think."},
        {"prompt": "hello ", "completion": "good morning to you \u00e9"},
    ]
    distill(
        "other_tokens",
        losses.ULDLoss(alpha=0.5),
        words,
        teacher=models / "gemma2",
        **dropout,
    )
    distill("resumed", hidden, fit={"stages": (1, 2)}, **dropout)
    distill("killed", fit={"dies_at": 3, "epochs": 2}, **dropout)
    samples = {"on_policy": True, "max_completion_length": 8}
    two = {**samples, "num_generations": 2}
    asked = [{"prompt_ids": r["prompt_ids"]} for r in completions]
    once = {"epochs": 1, "batch_size": 3}
    distill("on_policy", dataset=asked, compiled=two, fit=once, **dropout)
    distill(
        "on_policy_packed_micro",
        dataset=asked,
        fit={"packing": True, **once},
        compiled={**two, "micro_batch_size": 1, "num_iterations": 2},
        **dropout,
    )
    distill(
        "policy_gradient", losses.ReinforceLoss(), asked, once, compiled=two
    )
    distill(
        "policy_gradient_teacher_prompts",
        losses.ReinforceLoss(),
        [{k: r[k] for k in r if "completion" not in k} for r in context],
        once,
        compiled=two,
        **dropout,
    )
    distill(
        "share",
        dataset=completions,
        fit={**once, "epochs": 2},
        compiled={**samples, "on_policy": 0.5},
        **dropout,
    )
    distill(
        "share_resumed",
        dataset=completions,
        fit={"stages": (1, 2), "batch_size": 2},
        compiled={**samples, "on_policy": 0.5},
        **dropout,
    )

    @recorded("distill/served")
    def served(folder):
        teacher = kpt.SFTTask.from_preset(llama_ref, sequence_length=64)
        engine = kpt.rollout.NativeRollout()
        engine.set_model(teacher)
        make = made(
            kpt.DistillTask,
            compiled={**two, "top_k": 16},
            teacher=engine,
            **dropout,
        )
        return fitted(folder, make, asked, **once)

    # Meshes, of eight simulated devices

    fsdp, tensor = kpt.distribution.fsdp, kpt.distribution.tensor_parallel
    both = functools.partial(kpt.distribution.fsdp_tensor_parallel, 4, 2)
    data = kpt.distribution.data_parallel

    def mesh(name, layouts, kind, dataset, fit=None, **given):
        def run(folder):
            make = made(kind, **given)

            def on_mesh():
                keras.distribution.set_distribution(next(left)())
                return make()

            left = iter(layouts)
            settings = {"batch_size": 8, **(fit or {})}
            return fitted(folder, on_mesh, dataset, **settings)

        recorded(f"mesh/{name}", run)

    many = random_rows(16, seed=1)
    eight = read("dpo.json")["datasets"]["llama3"][:8]
    sampled = {"rewards": [odd], "max_completion_length": 6}
    tensor = functools.partial(tensor, 2)
    micro = {"micro_batch_size": 8}
    mesh("sft_data", [data], kpt.SFTTask, many, compiled=micro)
    mesh("sft_fsdp", [fsdp], kpt.SFTTask, many, compiled=micro)
    mesh("sft_tensor", [tensor], kpt.SFTTask, many, compiled=micro)
    mesh("sft_both", [both], kpt.SFTTask, many, compiled=micro, **dropout)
    mesh(
        "sft_packed_bfloat16", [fsdp], kpt.SFTTask, random_rows(30, seed=1),
        {"packing": True}, dtype="bfloat16", remat="full",
    )  # fmt: skip
    mesh(
        "sft_uneven", [fsdp], kpt.SFTTask, random_rows(13, seed=1),
        {"batch_size": 10}, compiled={"micro_batch_size": 3},
    )  # fmt: skip
    mesh(
        "sft_moved", [fsdp, both], kpt.SFTTask, many,
        {"stages": (1, 2)}, **dropout,
    )  # fmt: skip
    mesh("dpo", [fsdp], kpt.DPOTask, eight, reference=llama_ref, rate=1e-5)
    mesh(
        "dpo_coupled", [both], kpt.DPOTask, eight, {"batch_size": 5},
        compiled={"loss": losses.AOTLoss(), "micro_batch_size": 2},
        reference=llama_ref, rate=1e-5,
    )  # fmt: skip
    mesh("reward", [fsdp], kpt.RewardTask, eight, **dropout)
    mesh("distill", [both], kpt.DistillTask, many, teacher=llama_ref)
    mesh(
        "distill_on_policy", [fsdp], kpt.DistillTask, prompts, {"epochs": 1},
        compiled=samples, teacher=llama_ref, **dropout,
    )  # fmt: skip
    group = {**sampled, "num_generations": 4}
    mesh(
        "grpo_shared", [fsdp], kpt.GRPOTask, prompts,
        {"packing": 32, "share_prefix": True, "batch_size": 4, "epochs": 1},
        compiled={**group, "loss": losses.GRPOLoss(beta=0.01)},
        tokens=False, **dropout,
    )  # fmt: skip
    mesh(
        "ppo", [both], kpt.PPOTask, prompts, {"epochs": 1},
        compiled={**sampled, "num_iterations": 1}, tokens=False, rate=1e-4,
    )  # fmt: skip

    # Plans

    def plan(
        name, topology, kind=kpt.SFTTask, compiled=None, given=None, **how
    ):
        def run(folder):
            decode = how.pop("decode", False)
            with kpt.distribution.shapes_only():
                task = kind.from_preset(
                    llama, load_weights=False, sequence_length=64,
                    **(given or {}),
                )  # fmt: skip
            task.compile(keras.optimizers.AdamW(1e-4), **(compiled or {}))
            found = (task.plan_decode if decode else task.plan)(
                topology, **how
            )
            names = (
                "num_devices", "num_layers", "compiled_layers", "parameters",
                "trainable_parameters", "arguments", "known_temporaries",
                "tokens", "model_flops", "flops", "ideal", "ideal_bytes",
                "collective_bytes", "needed", "set_aside", "capacity", "fits",
                "seconds",
            )  # fmt: skip
            sent = [[c.kind, c.count, c.num_bytes] for c in found.collectives]
            return plain({k: getattr(found, k) for k in names}) | {
                "collectives": plain(sent)
            }

        recorded(f"plan/{name}", run)

    try:
        import libtpu  # noqa: F401

        tpu = ["v5e:2x2"]
    except ImportError:
        tpu = []
    for topology in ["cpu:8", *tpu]:
        label = topology.partition(":")[0]
        plan(f"{label}_sft", topology, batch_size=8, micro_batch_size=4)
        plan(
            f"{label}_dpo_shared", topology, kpt.DPOTask, batch_size=8,
            packing=128, share_prefix=True, prompt_length=24,
        )  # fmt: skip
        plan(f"{label}_grpo", topology, kpt.GRPOTask, group, batch_size=4)
    plan(
        "cpu_both", "cpu:8", given={"dtype": "bfloat16"}, strategy=both,
        remat="full",
    )  # fmt: skip
    plan("cpu_lora", "cpu:8", given={"lora": lora()}, packing=True)
    plan("cpu_reward", "cpu:8", kpt.RewardTask)
    plan("cpu_ppo", "cpu:8", kpt.PPOTask, group)
    plan("cpu_distill", "cpu:8", kpt.DistillTask, given={"teacher": llama_ref})
    if tpu:
        plan(
            "v5e_decode", "v5e:2x2", kpt.GRPOTask, group,
            decode=True, num_slots=8, num_tokens=128,
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out")
    recording.add_argument("--jobs", type=int, default=2)
    recording.add_argument(
        "--cache", help="a folder of compiled programs, kept for the next one"
    )
    comparing = commands.add_parser("compare")
    comparing.add_argument("first")
    comparing.add_argument("second")
    for command in (recording, comparing):
        command.add_argument("--only", default="", help="a regex of names")
    working = commands.add_parser("worker")
    working.add_argument("out")
    working.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.command == "record":
        os.environ |= environment(1)
        return record(args.out, args.only, args.jobs, args.cache)
    if args.command == "compare":
        return compare(args.first, args.second, args.only)
    return worker(args.out, args.names)


if __name__ == "__main__":
    sys.exit(main())
