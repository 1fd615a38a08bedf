"""Arguments and figures that the GRPO scripts share."""

import argparse
import math
import statistics
import time

import flops
import report
import workloads
from grpo_summary import PARTS


def parser():
    """Returns the argument parser of every script."""
    out = argparse.ArgumentParser()
    out.add_argument("--case", choices=list(workloads.RL), default="w5")
    out.add_argument("--passes", type=int, default=5, help="timed steps")
    return out


def arguments(options=None):
    """Parses the arguments and adds `work`, a `workloads.RLWork`, and `steps`.

    It must be called after the imports. The first step is the warm-up.

    Args:
        options: a parser, `parser()` with more options.
    """
    report.imports_done()
    args = (options or parser()).parse_args()
    args.work = workloads.RL[args.case]
    args.steps = 1 + args.passes
    return args


class Log:
    """Seconds and figures of each step.

    Attributes:
        steps: list of dicts: `step` and `PARTS`, in seconds.
        parts: dict, the seconds of the current step.
        rewards: list of floats, of all completions.
        trained: list of ints, the trained tokens of each step.
        logp_sums: list of floats, of the sampled tokens of each step.
    """

    def __init__(self):
        self.steps, self.rewards = [], []
        self.trained, self.logp_sums = [], []
        self.start()

    def start(self):
        self._last = time.perf_counter()
        self.parts = dict.fromkeys(PARTS, 0.0)

    def seconds(self):
        """Returns the seconds since the step began."""
        return time.perf_counter() - self._last

    def timed(self, part, function):
        """Wraps `function` to add its seconds to a part of the step."""

        def wrapper(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.parts[part] = self.parts.get(part, 0.0) + took

        return wrapper

    def step_ends(self, **parts):
        """Ends a step.

        Args:
            parts: seconds of parts that the library reports.
        """
        step = {"step": self.seconds(), **self.parts, **parts}
        self.steps.append(step)
        self.start()

    def record_tokens(self, tokens, logp_sum):
        """Records the tokens that a step is trained on."""
        self.trained.append(int(tokens))
        self.logp_sums.append(float(logp_sum))

    def reward(self, ids):
        self.rewards.append(workloads.even_share(ids))
        return self.rewards[-1]


def least_work(work, steps):
    """Returns the least work of a step after the first, see `flops`."""
    lengths = [len(ids) for ids in work.prompt_ids(steps)]
    n, tokens = work.prompts, work.max_tokens
    later = [lengths[i : i + n] for i in range(n, len(lengths), n)]
    samples = [[tokens] * work.samples] * n
    rollouts = [flops.rollout(work.model, step, samples) for step in later]
    operations, read = map(statistics.mean, zip(*rollouts, strict=True))
    updates = [
        flops.grpo(work.model, step, work.samples, tokens, workloads.LORA_RANK)
        for step in later
    ]
    return {
        "rollout_operations": operations,
        "rollout_bytes": read,
        "update_operations": statistics.mean(updates),
    }


def emit(args, packages, log, *, first_loss, **extra):
    """Prints the figures of a run as one line of JSON.

    Args:
        args: the result of `arguments`.
        packages: names of installed packages whose versions matter.
        log: `Log`, with a step for each of `args.steps`.
        first_loss: float, the loss of the first step.
        extra: further figures.
    """
    work = args.work
    counts = len(log.steps), len(log.trained), len(log.rewards)
    expected = args.steps, args.steps, args.steps * work.completions
    if counts != expected:
        raise ValueError(
            "A run must have made so many steps, trainings and rewards: "
            f"{expected}. Received: {counts}."
        )
    later = log.steps[1:]
    medians = {
        f"{part}_s": statistics.median(step[part] for step in later)
        for part in ("step", *PARTS)
    }
    rest = [s["step"] - sum(s[part] for part in PARTS) for s in later]
    first_step_s = log.steps[0]["step"]
    report.result(
        packages,
        # New tokens per second of the whole step.
        tokens_per_s=work.completions * work.max_tokens / medians["step_s"],
        **medians,
        other_s=statistics.median(rest),
        first_step_s=first_step_s,
        compile_s=max(first_step_s - medians["step_s"], 0.0),
        first_loss=float(first_loss),
        mean_logp=math.fsum(log.logp_sums) / sum(log.trained),
        reward=statistics.mean(log.rewards),
        trained_tokens=statistics.mean(log.trained),
        **least_work(work, args.steps),
        steps=[{k: round(v, 4) for k, v in s.items()} for s in log.steps],
        **extra,
    )
