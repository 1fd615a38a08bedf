"""Tokens per second of sampling with and without drafts.

A Llama, float32, one device. Its policy is set by hand: each token has one
usual next token, which follows with about 97 %, and seven others. So the
samples of a prompt differ in one of 32 tokens and continue in the same way, as
those of a policy of low entropy do. Engines with and without drafts take turns
in one process, with the same seeds; their samples must be equal. At a high
temperature all tokens are as probable, and no draft is ever right.

    python benchmarks/drafts.py
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import figures
import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt

HIDDEN, LAYERS, VOCABULARY = 512, 4, 4096
# The tokens that may follow, and the scores of the usual one and the others.
BRANCHES, USUAL, OTHER = 8, 16.0, 10.5
PROMPT, NEW = 16, 256
# The first epochs compile the programs, learn samples and measure passes.
WARM_UP = 3
# The samples of each prompt, and their most tokens.
CASES = {
    "1": [(1, NEW)],
    "2 of a prompt": [(2, NEW)],
    "4 of a prompt": [(4, NEW)],
    "8 of a prompt": [(8, NEW)],
    "31 of 64 tokens, one of 256": [(8, 64)] * 3 + [(7, 64), (1, NEW)],
}
TEMPERATURES = {"known": 1.0, "never known": 1e4}


def make_task():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=LAYERS,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=HIDDEN,
        intermediate_dim=3 * HIDDEN,
    )
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(VOCABULARY // BRANCHES, HIDDEN))
    steps /= np.linalg.norm(steps, axis=1, keepdims=True)
    embedding = backbone.token_embedding
    # Long vectors: what the layers add hardly changes them.
    embedding.embeddings.assign(30 * np.repeat(steps, BRANCHES, 0))
    before = np.repeat(np.roll(steps, 1, 0), BRANCHES, 0)
    scores = np.full((VOCABULARY, 1), OTHER)
    scores[::BRANCHES] = USUAL
    embedding.reverse_embeddings.assign((scores * before).T / HIDDEN**0.5)
    model = keras_hub.models.Llama3CausalLM(backbone)
    return kpt.SFTTask(model, sequence_length=512)


def requests(case, temperature, seed):
    return [
        kpt.rollout.Request(
            [BRANCHES * (100 * i + j) for j in range(PROMPT)],
            samples,
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
        )
        for i, (samples, tokens) in enumerate(CASES[case])
    ]


def timed(engine, asked):
    """Returns samples, and the seconds of the clock and of the processor."""
    starts = time.perf_counter(), time.process_time()
    found = engine.generate(asked)
    ends = time.perf_counter(), time.process_time()
    seconds = [b - a for a, b in zip(starts, ends)]
    return [c for samples in found for c in samples], seconds


def measure(task, case, policy, repeats):
    """Returns the figures of a case, each epoch with other seeds."""
    engines = {}
    for drafts in (False, True):
        engines[drafts] = kpt.rollout.NativeRollout(32, drafts=drafts)
        engines[drafts].set_model(task)
    row = {"samples": case, "policy": policy, "plain": [], "drafts": []}
    for epoch in range(WARM_UP + repeats):
        asked = requests(case, TEMPERATURES[policy], epoch)
        if epoch == WARM_UP:
            engines[True].metrics()
        plain, seconds = timed(engines[False], asked)
        drafted, fewer = timed(engines[True], asked)
        if [c.token_ids for c in plain] != [c.token_ids for c in drafted]:
            raise ValueError(f"Samples differ: {case}, {policy}")
        if epoch >= WARM_UP:
            row["plain"].append(seconds)
            row["drafts"].append(fewer)
    row["tokens"] = sum(len(c.token_ids) for c in plain)
    row["logp"] = float(
        np.mean(np.concatenate([c.per_token_logps for c in plain]))
    )
    return row | engines[True].metrics()


def medians(row, clock):
    """Returns the median seconds of a call without and with drafts."""
    return [
        statistics.median(x[clock] for x in row[name])
        for name in ("plain", "drafts")
    ]


def table(found):
    lines = [
        "| samples | next tokens | tokens/s, without drafts | with | ratio | "
        "lowest to highest | ratio of processor time | tokens a pass | "
        "drafted tokens accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        plain, drafts = medians(row, 0)
        # Of two calls that follow each other.
        each = [a[0] / b[0] for a, b in zip(row["plain"], row["drafts"])]
        cpu = medians(row, 1)
        lines.append(
            f"| {row['samples']} | {row['policy']} | "
            f"{row['tokens'] / plain:.0f} | {row['tokens'] / drafts:.0f} | "
            f"{plain / drafts:.2f} | {min(each):.2f} to {max(each):.2f} | "
            f"{cpu[0] / cpu[1]:.2f} | "
            f"{row['rollout/tokens_per_pass']:.2f} | "
            f"{row['rollout/draft_acceptance']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=3).parse_args()
    task, found = make_task(), []
    for case in CASES:
        for policy in TEMPERATURES:
            found.append(measure(task, case, policy, arguments.repeats))
            print(table(found[-1:]).splitlines()[-1], flush=True)
    figures.write(arguments.out, "drafts", found, table(found))


if __name__ == "__main__":
    main()
