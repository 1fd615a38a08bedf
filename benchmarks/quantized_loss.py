"""What rounding a base to eight or four bits costs.

A small Llama is trained on sequences of one language. Its linear layers are
rounded, and adapters are trained on sequences of another language near it:
the same rows and steps on the floats and on each kind of code.

    python benchmarks/quantized_loss.py
"""

import argparse
import json
import os
import pathlib
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import learning_rate as languages
import numpy as np

import keras_posttrain as kpt

RESULTS = pathlib.Path(__file__).parent / "results"
KINDS = {
    "floats": None,
    "int8": "int8",
    "int4": "int4",
    "int4, groups of 32": kpt.Quantization("int4", group_size=32),
    "nf4": "nf4",
    "nf4, double": kpt.Quantization("nf4", double=True),
}


def measure(folder, quantize, rows, held_out, spoken, seeds):
    """Returns the log-probs of `spoken`, and a held-out loss per seed."""
    losses = []
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        task = kpt.SFTTask.from_preset(
            folder,
            lora=kpt.LoRA(rank=8),
            quantize=quantize,
            sequence_length=languages.LENGTH,
        )
        found = np.concatenate(task.log_probs(spoken))
        task.compile(keras.optimizers.AdamW(1e-3))
        task.fit(rows, batch_size=16, epochs=2, seed=seed, verbose=0)
        logs = task.evaluate(held_out, batch_size=64, verbose=0)
        losses.append(logs["loss"])
    return found, losses


def table(found, settings):
    """Returns the results as Markdown."""
    lines = [
        "# Bases in eight and four bits",
        "",
        "`python benchmarks/quantized_loss.py`: " + settings,
        "The differences are of log-probabilities of the base's tokens, "
        "before training; the loss is that of held-out rows after training.",
        "",
        "| base | mean difference | largest difference | loss | over floats "
        "| by seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, x in found.items():
        seeds = ", ".join(f"{ratio - 1:+.2%}" for ratio in x["ratios"])
        lines.append(
            f"| {name} | {x['mean']:.4f} | {x['largest']:.2f} | "
            f"{np.mean(x['losses']):.4f} | {np.mean(x['ratios']) - 1:+.2%} | "
            f"{seeds} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    both = languages.language(0), languages.language(1)
    base = languages.make(args.width, None, None)
    base.compile(keras.optimizers.AdamW(1e-3))
    train = languages.sequences(1, 8192, both, languages.BEFORE)
    base.fit(train, batch_size=32, epochs=3, verbose=0)
    spoken = languages.sequences(4, 256, both, languages.BEFORE)
    rows = languages.sequences(2, args.rows, both, languages.AFTER)
    held_out = languages.sequences(3, 256, both, languages.AFTER)
    before = base.evaluate(spoken, batch_size=64, verbose=0)["loss"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        base.export(folder)
        for name, kind in KINDS.items():
            values, losses = measure(
                folder, kind, rows, held_out, spoken, args.seeds
            )
            if kind is None:
                floats, first = values, losses
            # Tokens without loss have no log-probability: 0.
            gaps = np.abs(values - floats)[floats != 0]
            found[name] = {
                "mean": float(gaps.mean()),
                "largest": float(gaps.max()),
                "losses": losses,
                "ratios": [x / y for x, y in zip(losses, first)],
            }
            print(name, json.dumps(found[name]), flush=True)
    settings = (
        f"a Llama of 3 layers and width {args.width} (loss {before:.3f}), "
        f"adapters of rank 8, {args.rows} rows of {languages.LENGTH} tokens "
        f"twice, {args.seeds} seeds."
    )
    text = json.dumps({"settings": vars(args) | {"out": None}, **found})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "quantized_loss.json").write_text(text + "\n")
    (args.out / "quantized_loss.md").write_text(table(found, settings))


if __name__ == "__main__":
    main()
