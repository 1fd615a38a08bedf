"""Memory and time of computing a prompt, whole and in pieces.

A prompt is computed and written to one of eight slots: a small Llama,
float32, one device. Memory is the compiler's, of the program that needs most
next to the weights and the cache. Sizes of pieces take turns.

    python benchmarks/prefill.py
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import figures
import jax
import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.rollout.native import decoding

VOCABULARY, SLOTS, ROOM = 2048, 8, 64
LENGTHS = (512, 2048, 8192)
CHUNKS = (512, 1024, None)


def make_task():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=4,
        num_query_heads=8,
        num_key_value_heads=2,
        hidden_dim=256,
        intermediate_dim=768,
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    return kpt.SFTTask(model, sequence_length=LENGTHS[-1] + ROOM)


class Prefill:
    """A prompt of `length` tokens, in pieces of `chunk`, `None` for whole."""

    def __init__(self, task, length, chunk):
        parts = task.policy, task.using_weights
        self.weights = decoding.Weights(
            [x.value for x in task.trainable_variables],
            [x.value for x in task.non_trainable_variables],
            False,
        )
        empty = decoding.empty_layers(*parts, self.weights[:2])
        self.decoder = decoding.SlotDecoder(
            *parts,
            empty,
            lambda text: None,
            chunk or max(length, decoding.CHUNK),
        )
        ids = np.random.default_rng(0).integers(3, VOCABULARY, length)
        self.prompts = [tuple(ids.tolist())]
        self.tokens = decoding.bucket(length + ROOM)

    def memory(self):
        """Returns the most bytes of a program, without arguments."""
        lowered = []
        decoder = self.decoder.lowering(lowered)
        decoder.allocate(SLOTS, self.tokens)
        lowered.clear()
        decoder.prefill(self.weights, self.prompts, [[0]])
        found = [x.compile().memory_analysis() for x in lowered]
        return max(
            x.temp_size_in_bytes
            + x.output_size_in_bytes
            - x.alias_size_in_bytes
            for x in found
        )

    def seconds(self):
        self.decoder.allocate(SLOTS, self.tokens)
        jax.block_until_ready(self.decoder.cache)
        start = time.perf_counter()
        self.decoder.prefill(self.weights, self.prompts, [[0]])
        jax.block_until_ready(self.decoder.cache)
        self.decoder.free()
        return time.perf_counter() - start


def measure(repeats):
    """Returns the figures of each length and size of pieces."""
    task, found = make_task(), []
    for length in LENGTHS:
        cases = {
            chunk: Prefill(task, length, chunk)
            for chunk in CHUNKS
            if chunk is None or chunk < length
        }
        rows = {
            chunk: {
                "length": length,
                "chunk": chunk,
                "bytes": case.memory(),
                "seconds": [],
            }
            for chunk, case in cases.items()
        }
        for repeat in range(1 + repeats):
            for chunk, case in cases.items():
                seconds = case.seconds()
                # The first time compiles.
                if repeat:
                    rows[chunk]["seconds"].append(seconds)
        found += rows.values()
    return found


def table(found):
    lines = [
        "| tokens of a prompt | tokens of a piece | MiB, without weights and "
        "cache | s | fastest to slowest |",
        "|---|---|---|---|---|",
    ]
    for x in found:
        chunk = f"{x['chunk']:,}" if x["chunk"] else "whole"
        seconds = x["seconds"]
        lines.append(
            f"| {x['length']:,} | {chunk} | {x['bytes'] / 2**20:.1f} | "
            f"{statistics.median(seconds):.2f} | "
            f"{min(seconds):.2f} to {max(seconds):.2f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=5).parse_args()
    found = measure(arguments.repeats)
    figures.write(arguments.out, "prefill", found, table(found))


if __name__ == "__main__":
    main()
