"""Rollouts that overlap with training, compared with alternation.

    python benchmarks/staleness.py                      # the built-in engine
    python benchmarks/staleness.py --engine vllm        # needs vLLM

GRPO with a slow reward, such as a language model behind an API, with
`max_staleness` 0, 1, 2 and so on, one after the other in one process. Model
and prompts are those of `grpo.py`. The table is written to
`results/staleness-ENGINE.md` and the figures to a `.json` file of that name.
"""

import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import keras_posttrain as kpt

# isort: split
import figures
import preset
import workloads

# Rollouts that are not timed: programs are compiled, and the first rollouts
# start together.
WARM_UP = 4


class Clock(keras.callbacks.Callback):
    """Records the end of each step and its logs."""

    def __init__(self):
        super().__init__()
        self.ends, self.logs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())
        self.logs.append(dict(logs))


def run(folder, work, arguments, max_staleness):
    """Runs GRPO; returns the seconds per step and its metrics."""
    keras.utils.set_random_seed(0)
    task = kpt.GRPOTask.from_preset(
        folder,
        lora=kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA),
        sequence_length=work.longest,
    )

    def even_share(completion_ids):
        time.sleep(arguments.reward_seconds)
        return [sum(x % 2 == 0 for x in c) / len(c) for c in completion_ids]

    engine = "auto"
    if arguments.engine == "vllm":
        engine = kpt.rollout.VLLMRollout()
    clock = Clock()
    task.compile(
        keras.optimizers.AdamW(workloads.LEARNING_RATE),
        rewards=[even_share],
        rollout=engine,
        num_generations=work.samples,
        max_completion_length=work.max_tokens,
        stop_token_ids=None,
    )
    rows = work.prompt_ids(arguments.steps + WARM_UP)
    task.fit(
        [{"prompt_ids": ids} for ids in rows],
        batch_size=work.prompts,
        shuffle=False,
        callbacks=[clock],
        max_staleness=max_staleness,
        verbose=0,
    )
    last = clock.logs[-1]
    # Steps come in bursts, so the mean is taken over all of them.
    took = clock.ends[-1] - clock.ends[WARM_UP - 1]
    ratio = "sampling/importance_sampling_ratio/mean"
    return {
        "max_staleness": max_staleness,
        "seconds": took / arguments.steps,
        "rollout": statistics.median(x["time/rollout"] for x in clock.logs),
        "train": statistics.median(x["time/train"] for x in clock.logs),
        "staleness": last.get("staleness/mean", 0.0),
        "ratio": last.get(ratio, 1.0),
        "reward_seconds": arguments.reward_seconds,
    }


def table(records):
    """Returns a Markdown table; ratios are to `max_staleness=0`."""
    turns = next(r["seconds"] for r in records if not r["max_staleness"])
    head = (
        "max_staleness | s/step | speed-up | sampling, s | "
        "training, s | rewards, s | staleness of the last step"
    )
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for r in records:
        lines.append(
            f"| {r['max_staleness']} | {r['seconds']:.2f} "
            f"| {turns / r['seconds']:.2f} | {r['rollout']:.2f} "
            f"| {r['train']:.2f} | {r['reward_seconds']:.2f} "
            f"| {r['staleness']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__)
    parser.add_argument(
        "--engine", choices=("native", "vllm"), default="native"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="timed ones")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--reward-seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    work = workloads.RL["w5"]
    with tempfile.TemporaryDirectory() as folder:
        preset.write(work.model, pathlib.Path(folder))
        found = [
            [run(folder, work, arguments, k) for k in arguments.staleness]
            for _ in range(arguments.repeats)
        ]
    records = [
        {k: statistics.median(r[k] for r in column) for k in column[0]}
        for column in zip(*found)
    ]
    name = f"staleness-{arguments.engine}"
    figures.write(arguments.out, name, records, table(records))


if __name__ == "__main__":
    main()
