"""Arguments and measurements that the rollout scripts share.

A script passes `sample(prompts, samples, max_tokens, stop, temperature,
seed)`, which returns a list of `(token ids, log-probs or None)`. The samples
of a prompt are adjacent, and a stop token is a sample's last token.
"""

import argparse
import math
import statistics
import time

import flops
import report
import workloads

# All libraries must agree on this many tokens after the first prompts.
GREEDY_PROMPTS, GREEDY_TOKENS = 4, 32
# No pass begins after this time in seconds.
PASSES_S = 40
# Calls before the passes: samples of other lengths compile other programs.
WARM_CALLS = 3


def parser():
    """Returns the argument parser of every rollout script."""
    out = argparse.ArgumentParser()
    out.add_argument("--case", choices=list(workloads.ROLLOUTS), default="a")
    out.add_argument("--passes", type=int, default=2)
    return out


def arguments(options=None):
    """Parses the arguments and adds `work`, the `workloads.Rollout`.

    It must be called after the imports.

    Args:
        options: a parser, `parser()` with more options.
    """
    report.imports_done()
    args = (options or parser()).parse_args()
    args.work = workloads.ROLLOUTS[args.case]
    return args


def cut(ids, stop):
    """Cuts a sample after its first stop token."""
    for i, token in enumerate(ids):
        if token in stop:
            return ids[: i + 1]
    return ids


def timed(function, *args):
    start = time.perf_counter()
    out = function(*args)
    return time.perf_counter() - start, out


def check(work, samples):
    """Raises an error if samples do not match the request."""
    expected = work.prompts * work.samples
    if len(samples) != expected:
        raise ValueError(f"Not {expected} samples but {len(samples)}.")
    stop = set(work.stop_ids())
    for i, (ids, logps) in enumerate(samples):
        ended = bool(ids) and ids[-1] in stop
        if stop.intersection(ids[:-1]) or not (
            ended or len(ids) == work.max_tokens
        ):
            raise ValueError(
                f"Sample {i} of {len(ids)} tokens neither has "
                f"{work.max_tokens} nor ends at its first stop token."
            )
        if logps is not None and len(logps) != len(ids):
            raise ValueError(
                f"Sample {i}: {len(ids)} tokens, {len(logps)} log-probs."
            )


def needed(work, prompts, samples):
    """Returns the least operations and bytes of a pass, see `flops`."""
    lengths = [len(ids) for ids, _ in samples]
    n = work.samples
    groups = [lengths[i : i + n] for i in range(0, len(lengths), n)]
    return flops.rollout(work.model, [len(ids) for ids in prompts], groups)


def mean_logp(samples):
    """Returns the mean log-prob of sampled tokens, minus the entropy."""
    if any(logps is None for _, logps in samples):
        return None
    values = [float(x) for _, logps in samples for x in logps]
    return math.fsum(values) / len(values)


def measure(args, sample, packages, *, ready_s, prefill=True, **extra):
    """Runs the work and prints its figures.

    Args:
        args: the result of `arguments`.
        sample: function of the library, see above.
        packages: names of installed packages whose versions matter.
        ready_s: float, seconds it took to load the model and be ready.
        prefill: bool, whether a call for one token mostly processes prompts.
        extra: further figures, or functions that give them at the end.
    """
    work = args.work
    prompts, stop = work.prompt_ids(), work.stop_ids()

    def call(seed, max_tokens=work.max_tokens):
        return timed(
            sample, prompts, work.samples, max_tokens, stop, 1.0, seed
        )

    first_call_s, samples = call(0)
    check(work, samples)
    warm_s = first_call_s
    for seed in range(1, WARM_CALLS):
        warm_s += call(1000 + seed)[0]
    pass_s, counts, means, least = [], [], [], []
    while len(pass_s) < args.passes and sum(pass_s) < PASSES_S:
        seconds, samples = call(len(pass_s) + 1)
        check(work, samples)
        pass_s.append(seconds)
        counts.append(sum(len(ids) for ids, _ in samples))
        means.append(mean_logp(samples))
        least.append(needed(work, prompts, samples))
    operations, read = map(sum, zip(*least, strict=True))
    figures = {
        "tokens_per_s": statistics.median(
            n / s for n, s in zip(counts, pass_s, strict=True)
        ),
        "ready_s": ready_s,
        "first_call_s": first_call_s,
        "warm_s": warm_s,
        "pass_s": pass_s,
        "new_tokens": counts,
        "operations_per_token": operations / sum(counts),
        "bytes_per_token": read / sum(counts),
        "mean_logp": None if None in means else statistics.mean(means),
        # Before the calls below, which are not part of the work.
        "peak_gb": report.peak_gb(),
        "other_cpus": report.other_cpus(),
    }
    if prefill:
        call(0, 1)  # compiles
        prefill_s = statistics.median(call(i, 1)[0] for i in range(3))
        num_samples = work.prompts * work.samples
        figures["prefill_s"] = prefill_s
        figures["decode_tokens_per_s"] = statistics.median(
            (n - num_samples) / (s - prefill_s)
            for n, s in zip(counts, pass_s, strict=True)
        )
    greedy = sample(prompts[:GREEDY_PROMPTS], 1, GREEDY_TOKENS, [], 0.0, 0)
    report.result(
        packages,
        **figures,
        greedy=[[int(i) for i in ids] for ids, _ in greedy],
        greedy_logps=[
            None if logps is None else [round(float(x), 7) for x in logps]
            for _, logps in greedy
        ],
        **{k: v() if callable(v) else v for k, v in extra.items()},
    )
