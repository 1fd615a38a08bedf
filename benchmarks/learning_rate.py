"""Compares the learning rates of `task.suggest` with the best of a sweep.

A small Llama is trained on sequences of one language, and fine-tuned on those
of another one near it: with all weights, and with adapters of several ranks
and scales. Each learning rate of a grid is tried with several seeds; the best
is where the held-out loss is lowest, by a parabola through the lowest points.

    python benchmarks/learning_rate.py
"""

import argparse
import json
import math
import os
import pathlib
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt

RESULTS = pathlib.Path(__file__).parent / "results"
VOCABULARY, LENGTH = 96, 48
# The grid: factors of the suggested rate.
FACTORS = [2.0**i for i in range(-4, 4)]
# The shares of the two languages.
BEFORE, AFTER = (1.0, 0.0), (0.85, 0.3)
CASES = {
    "all weights": None,
    "rank 2": kpt.LoRA(rank=2),
    "rank 8": kpt.LoRA(rank=8),
    "rank 32": kpt.LoRA(rank=32),
    "rank 8, alpha 64": kpt.LoRA(rank=8, alpha=64),
    "rank 32, alpha 16": kpt.LoRA(rank=32, alpha=16),
}


def language(seed):
    """Returns the probabilities of each token after each pair of tokens."""
    rng = np.random.default_rng(seed)
    single = rng.normal(0, 2.0, (VOCABULARY, VOCABULARY))
    other = rng.normal(0, 1.0, (VOCABULARY, VOCABULARY))
    return single, other


def sequences(seed, count, languages, shares):
    """Samples rows of a language that is a mixture of several."""
    rng = np.random.default_rng(seed)
    single = sum(s * x for s, (x, _) in zip(shares, languages))
    other = sum(s * x for s, (_, x) in zip(shares, languages))
    ids = rng.integers(3, VOCABULARY, (count, LENGTH))
    for i in range(2, LENGTH):
        logits = single[ids[:, i - 1]] + other[ids[:, i - 2]]
        logits[:, :3] = -np.inf
        noise = rng.gumbel(size=logits.shape)
        ids[:, i] = (logits + noise).argmax(-1)
    mask = [0] + [1] * (LENGTH - 1)
    return [{"token_ids": x, "completion_mask": mask} for x in ids.tolist()]


def model(width):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=3,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=3 * width,
    )
    return keras_hub.models.LlamaCausalLM(backbone)


def make(width, weights, lora):
    task = kpt.SFTTask(model(width), lora=lora, sequence_length=LENGTH)
    if weights is not None:
        own = [v for v in task.causal_lm.weights if "lora" not in v.path]
        for variable, value in zip(own, weights, strict=True):
            variable.assign(value)
    return task


def pretrained(width, languages, rows):
    task = make(width, None, None)
    task.compile(keras.optimizers.AdamW(3e-3))
    train = sequences(1, rows, languages, BEFORE)
    task.fit(train, batch_size=32, epochs=4, verbose=0)
    return [np.array(v.value) for v in task.causal_lm.weights]


def lowest(rates, losses):
    """Returns the rate at the minimum of a parabola through the lowest."""
    i = min(max(int(np.argmin(losses)), 1), len(rates) - 2)
    x, y = np.log(rates[i - 1 : i + 2]), losses[i - 1 : i + 2]
    a, b, _ = np.polyfit(x - x[1], y, 2)
    shift = float(np.clip(-b / (2 * a), x[0] - x[1], x[2] - x[1]))
    return float(np.exp(x[1] + (shift if a > 0 else 0.0)))


def sweep(width, weights, lora, rows, held_out, seeds):
    """Returns the suggested and the best rate, and the losses of a grid."""
    task = make(width, weights, lora)
    task.compile(**task.suggest(rows).compile)
    suggested = float(task.optimizer.learning_rate)
    variables = [*task.trainable_variables, *task.optimizer.variables]
    start = [np.array(v.value) for v in variables]

    def loss(rate, seed):
        for variable, value in zip(variables, start):
            variable.assign(value)
        task.optimizer.learning_rate = rate
        task.fit(rows, batch_size=16, seed=seed, verbose=0)
        logs = task.evaluate(held_out, batch_size=64, verbose=0)
        return min(logs["loss"], 1e3) if math.isfinite(logs["loss"]) else 1e3

    rates = [suggested * factor for factor in FACTORS]
    losses = [
        float(np.mean([loss(rate, seed) for seed in range(seeds)]))
        for rate in rates
    ]
    best = lowest(rates, losses)
    return {
        "suggested": suggested,
        "best": best,
        "ratio": suggested / best,
        "loss_at_suggested": losses[FACTORS.index(1.0)],
        "lowest_loss": min(losses),
        "rates": rates,
        "losses": losses,
    }


def table(found, settings):
    """Returns the results as Markdown."""
    lines = [
        "# Suggested and best learning rates",
        "",
        "`python benchmarks/learning_rate.py`: " + settings,
        "",
        "| weights | alpha | suggested | best | suggested / best | loss "
        "there | lowest loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in found.items():
        lora = CASES[name]
        alpha = "" if lora is None else f"{lora.scale * lora.rank:g}"
        lines.append(
            f"| {name} | {alpha} | {x['suggested']:.1e} | {x['best']:.1e} | "
            f"{x['ratio']:.2f} | {x['loss_at_suggested']:.4f} | "
            f"{x['lowest_loss']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    began = time.perf_counter()
    languages = language(0), language(1)
    weights = pretrained(args.width, languages, 4096)
    rows = sequences(2, args.rows, languages, AFTER)
    held_out = sequences(3, 256, languages, AFTER)
    found = {}
    for name, lora in CASES.items():
        found[name] = sweep(
            args.width, weights, lora, rows, held_out, args.seeds
        )
        print(name, json.dumps(found[name]), flush=True)
    seconds = time.perf_counter() - began
    settings = (
        f"a Llama of 3 layers and width {args.width}, {args.rows} rows of "
        f"{LENGTH} tokens, batches of 16, means of {args.seeds} seeds, "
        f"{seconds / 60:.0f} minutes on two CPU cores."
    )
    out = pathlib.Path(args.out)
    text = json.dumps({"settings": vars(args) | {"out": None}, **found})
    (out / "learning_rate.json").write_text(text + "\n")
    (out / "learning_rate.md").write_text(table(found, settings))


if __name__ == "__main__":
    main()
