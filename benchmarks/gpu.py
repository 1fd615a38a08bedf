"""Training steps on a GPU in bfloat16, by what computes attention.

A Llama of the shape of Llama-3.2-1B, with random weights and LoRA on all
linear layers, is fine-tuned on rows of one document and on packed rows, tuned
on preferences, and trained by GRPO with the built-in engine. Each kind of step
runs with every choice of `attention` that can compute it, in a process of its
own, on the first device. The share of the peak is that of the model's
operations by formula (Chowdhery et al., 2022, appendix B), in the time of a
step; in GRPO of the updates, in their time.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --size tiny        # on any device, in minutes

No GPU has run it yet: there are no results in `results/`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

import figures

os.environ.setdefault("KERAS_BACKEND", "jax")

# The shape of the model, tokens of a row, rows, pairs or completions of a
# step, and of a micro-batch.
SIZES = {
    "1b": (
        {
            "vocabulary_size": 128_256,
            "num_layers": 16,
            "num_query_heads": 32,
            "num_key_value_heads": 8,
            "hidden_dim": 2048,
            "intermediate_dim": 8192,
        },
        4096,
        8,
        1,
    ),
    "tiny": (
        {
            "vocabulary_size": 512,
            "num_layers": 2,
            "num_query_heads": 2,
            "num_key_value_heads": 1,
            "hidden_dim": 64,
            "intermediate_dim": 128,
        },
        64,
        4,
        2,
    ),
}
# Documents of a packed row, and completions of a prompt.
DOCUMENTS, GENERATIONS = 8, 4
# Each kind of step to the choices that can compute it on a CUDA GPU.
CASES = {
    "sft": ("blocks", "cudnn", "pallas"),
    "sft, packed": ("blocks", "pallas"),
    "dpo": ("blocks", "cudnn", "pallas"),
    "grpo": ("blocks", "cudnn", "pallas"),
}
# Steps that compile, and that are measured.
WARM_UP, STEPS = 2, 8
# Dense bfloat16 TFLOP/s in NVIDIA's data sheets, by a part of JAX's name of
# the device.
PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
}


def peak(device_kind):
    """Returns the peak of a device in TFLOP/s, `None` if unknown."""
    found = (
        number
        for name, number in PEAKS.items()
        if re.search(rf"\b{name}\b", device_kind)
    )
    return next(found, None)


def make_task(case, size, attention):
    """Returns a compiled task, tokens of a row and rows of a step."""
    # Only the processes that measure need these.
    import keras
    import keras_hub

    import keras_posttrain as kpt

    shape, length, rows, micro_batch_size = SIZES[size]
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(**shape, dtype="bfloat16")
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    kinds = {"dpo": kpt.DPOTask, "grpo": kpt.GRPOTask}
    task = kinds.get(case, kpt.SFTTask)(
        model,
        lora=kpt.LoRA(rank=16),
        sequence_length=length,
        remat="outputs",
        attention=attention,
    )
    more = {}
    if case == "grpo":
        more = {
            "rewards": [lambda completions: [c[0] % 7.0 for c in completions]],
            "num_generations": GENERATIONS,
            "max_completion_length": length // 2,
            "stop_token_ids": [1],
        }
    task.compile(
        keras.optimizers.AdamW(1e-5), micro_batch_size=micro_batch_size, **more
    )
    return task, length, rows


def make_rows(case, length, rows, vocabulary):
    """Returns the rows of a step, all of them full, and its `batch_size`."""
    # See `make_task`.
    import numpy as np

    rng = np.random.default_rng(0)

    def ids(count):
        return rng.integers(3, vocabulary, count).tolist()

    half = length // 2
    if case == "grpo":
        count = rows // GENERATIONS
        return [{"prompt_ids": ids(half)} for _ in range(count)], count
    if case == "dpo":
        pairs = [
            {
                "prompt_ids": ids(half),
                "chosen_ids": ids(half),
                "rejected_ids": ids(half),
            }
            for _ in range(rows // 2)
        ]
        return pairs, len(pairs)
    parts = DOCUMENTS if case == "sft, packed" else 1
    return [
        {"token_ids": ids(length // parts)} for _ in range(rows * parts)
    ], rows


def model_flops(task, case, rows, batch_size):
    """Returns the operations of the model in a step, by formula."""
    # See `make_task`.
    import jax

    import keras_posttrain as kpt
    from keras_posttrain.planning import formulas, lowering

    device = kpt.distribution.data_parallel(devices=jax.devices()[:1])
    with lowering.planned(task, device) as plan:
        if case.startswith("sft"):
            examples, _ = task.prepare(rows)
            packing = case == "sft, packed"
            batches = task.make_batches(
                examples, batch_size, packing=packing, shuffle=False
            )
            batch = next(iter(batches.get_jax_iterator()))
        else:
            batch = plan.task.example_batch(batch_size)
        return formulas.model_flops(plan, batch)


def run(case, size, attention):
    """Returns the figures of one kind of step with one choice."""
    # See `make_task`.
    import jax
    import keras

    class Clock(keras.callbacks.Callback):
        """Times steps from end to end, sampling included."""

        def on_train_begin(self, logs=None):
            self.losses, self.seconds, self.updates = [], [], []
            self.skipped, self.end = 0.0, time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(float(logs["loss"]))
            now = time.perf_counter()
            self.seconds.append(now - self.end)
            self.updates.append(logs.get("time/train", self.seconds[-1]))
            self.skipped += float(logs["skipped"])
            self.end = now

    task, length, count = make_task(case, size, attention)
    rows, batch_size = make_rows(
        case, length, count, SIZES[size][0]["vocabulary_size"]
    )
    clock = Clock()
    task.fit(
        rows,
        batch_size=batch_size,
        epochs=WARM_UP + STEPS,
        callbacks=[clock],
        verbose=0,
        **({"packing": True} if case == "sft, packed" else {}),
    )
    if clock.skipped:
        raise ValueError(f"{clock.skipped:.0f} steps changed nothing.")
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "tokens": count * length,
        "flops": model_flops(task, case, rows, batch_size),
        "memory": memory,
        "losses": clock.losses,
        "seconds": clock.seconds[WARM_UP:],
        "updates": clock.updates[WARM_UP:],
    }


def measure(case, size, attention):
    """Runs one choice in a process of its own; returns its figures."""
    command = [sys.executable, __file__, "--size", size]
    command += ["--run", case, "--attention", attention]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def choices(case):
    """Returns the choices of a kind of step on this machine's device."""
    code = "import jax; print(getattr(jax.devices()[0], "
    code += "'compute_capability', ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    is_cuda = re.search(r"^\d+\.\d+$", done.stdout.strip())
    return CASES[case] if is_cuda else ("blocks",)


def differences(found):
    """Lists where the last losses of two choices differ by over 2 %."""
    messages = []
    for case in CASES:
        if case == "grpo":
            # Samples differ where a rounding does.
            continue
        last = {
            attention: x["losses"][-1]
            for (name, attention), x in found.items()
            if name == case and "error" not in x
        }
        if last and max(last.values()) > 1.02 * min(last.values()):
            messages.append(f"{case}: {last}")
    return messages


def table(found):
    """Returns the table of figures by kind of step and choice, Markdown."""
    lines = [
        "| step | attention | s/step | fastest to slowest | tokens/s | "
        "GiB at most | model TFLOP/s | share of the peak | last loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (case, attention), x in found.items():
        if "error" in x:
            lines.append(f"| {case} | {attention} | {x['error']} |" + " |" * 6)
            continue
        seconds = x["seconds"]
        middle = statistics.median(seconds)
        rate = x["flops"] / statistics.median(x["updates"]) / 1e12
        best, memory = peak(x["device"]), x["memory"]
        share = "-" if best is None else f"{rate / best:.1%}"
        memory = "-" if memory is None else f"{memory / 2**30:.1f}"
        lines.append(
            f"| {case} | {attention} | {middle:.3f} | {min(seconds):.3f} to "
            f"{max(seconds):.3f} | {x['tokens'] / middle:,.0f} | "
            f"{memory} | {rate:.3g} | {share} | {x['losses'][-1]:.4f} |"
        )
    done = [x for x in found.values() if "error" not in x]
    devices = {f"{x['device']}, JAX {x['jax']}" for x in done}
    return "\n".join([", ".join(sorted(devices)), "", *lines]) + "\n"


def main():
    parser = figures.parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--only", default="", help="a regular expression")
    # What one process does.
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--attention", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        found = run(arguments.run, arguments.size, arguments.attention)
        print(json.dumps(found))
        return None
    found = {}
    for case in CASES:
        if re.search(arguments.only, case):
            for attention in choices(case):
                row = measure(case, arguments.size, attention)
                found[case, attention] = row
                print(f"{case}, {attention}: {row}", flush=True)
    name = "gpu" if arguments.size == "1b" else f"gpu_{arguments.size}"
    named = {", ".join(k): x for k, x in found.items()}
    figures.write(arguments.out, name, named, table(found))
    messages = differences(found)
    failed = [", ".join(k) for k, x in found.items() if "error" in x]
    if messages or failed:
        return f"losses that differ: {messages}; runs that failed: {failed}"
    return None


if __name__ == "__main__":
    sys.exit(main())
