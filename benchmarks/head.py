"""Memory and time of the projection on the vocabulary, in tiles and whole.

A loss of 1,000 tokens, float32: its value and the gradients of the hidden
states and of the kernel ("trained") or of the hidden states alone ("frozen"),
or log-probabilities and entropies ("values"). A product has a tile of the
vocabulary, as by default on a CPU, or all of it; the two take turns. Chunks
have the same tokens, but those of values in tiles, which keep no logits, have
more. Memory is the compiler's, without arguments and results. Shares are those
of the machine's fastest product, of the same run.

    python benchmarks/head.py
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import figures
import jax
import jax.numpy as jnp
import limits

from keras_posttrain.models import head as heads

TOKENS = 1000
# Vocabulary, hidden size, and whether the kernel is a tied embedding.
SHAPES = (
    (32_000, 256, False),
    (128_256, 2048, False),
    (151_936, 896, True),
    (262_144, 256, True),
)
# The products with the kernel in each case.
PRODUCTS = {"trained": 3, "frozen": 2, "values": 1}


def arguments_of(vocabulary, width, tied):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (vocabulary, width) if tied else (width, vocabulary)
    return (
        jax.random.normal(keys[0], (TOKENS, width)),
        jax.random.normal(keys[1], shape) * 0.02,
        jax.random.randint(keys[2], (1, TOKENS), 0, vocabulary),
    )


def program(case, tied, tile, hidden, kernel, token_ids):
    """Returns the compiled function of a case."""
    head = heads.Head(transposed=tied, trainable=case == "trained", tile=tile)
    tokens = heads.select_tokens(
        token_ids, jnp.ones(token_ids.shape, bool), jnp.arange(TOKENS)[None]
    )

    def loss(hidden, kernel):
        weights = jnp.ones(TOKENS)
        return heads.token_loss_sum(
            head, hidden, kernel, tokens, weights, jnp.negative
        )[0]

    def values(hidden, kernel):
        return heads.token_values(
            head, hidden, kernel, tokens, extras=("entropies",)
        )

    function = {
        "trained": jax.grad(loss, argnums=(0, 1)),
        "frozen": jax.grad(loss),
        "values": values,
    }[case]
    return jax.jit(function).lower(hidden, kernel).compile()


def measure(repeats):
    """Returns the figures of each shape, case and kind of products."""
    peak, found = limits.operations_per_s(), []
    for vocabulary, width, tied in SHAPES:
        arrays = arguments_of(vocabulary, width, tied)
        for case, products in PRODUCTS.items():
            programs = {
                "tiles": program(case, tied, None, *arrays),
                "whole": program(case, tied, vocabulary, *arrays),
            }
            seconds = {kind: [] for kind in programs}
            for repeat in range(1 + repeats):
                for kind, run in programs.items():
                    begin = time.perf_counter()
                    jax.block_until_ready(run(*arrays[:2]))
                    if repeat:
                        seconds[kind].append(time.perf_counter() - begin)
            found.append(
                {
                    "vocabulary": vocabulary,
                    "width": width,
                    "case": case,
                    "least_s": products
                    * 2
                    * TOKENS
                    * vocabulary
                    * width
                    / peak,
                    "seconds": seconds,
                    "bytes": {
                        kind: run.memory_analysis().temp_size_in_bytes
                        for kind, run in programs.items()
                    },
                }
            )
    return {"peak_flops": peak, "cases": found}


def table(found):
    lines = [
        f"Fastest product: {found['peak_flops'] / 1e9:.0f} GFLOP/s. "
        f"{os.cpu_count()} CPUs.",
        "",
        "| vocabulary | hidden size | kernel | tiles, s | whole, s | tiles / "
        "whole | lowest to highest | of the fastest product, tiles | whole | "
        "MiB, tiles | whole |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in found["cases"]:
        tiles, whole = x["seconds"]["tiles"], x["seconds"]["whole"]
        # Of two calls that follow each other.
        ratios = [a / b for a, b in zip(tiles, whole)]
        medians = [statistics.median(s) for s in (tiles, whole)]
        shares = [x["least_s"] / s for s in medians]
        memory = [x["bytes"][k] / 2**20 for k in ("tiles", "whole")]
        lines.append(
            f"| {x['vocabulary']:,} | {x['width']:,} | {x['case']} | "
            f"{medians[0]:.2f} | {medians[1]:.2f} | "
            f"{statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | "
            f"{shares[0]:.0%} | {shares[1]:.0%} | "
            f"{memory[0]:,.0f} | {memory[1]:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=5).parse_args()
    found = measure(arguments.repeats)
    figures.write(arguments.out, "head", found, table(found))


if __name__ == "__main__":
    main()
