"""Memory and time of decoding with caches of the size of a sliding window.

A small Gemma 3, float32, one device: 5 of its 6 layers see a window of 64 or
128 tokens. Slots that are full but for one call decode 32 tokens each, with
rings for these layers and with whole caches; both take turns.

    python benchmarks/window_cache.py
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
from keras_posttrain.models.key_values import KeyValues
from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.schedule import decoder_state

VOCABULARY, SLOTS = 2048, 16
WINDOWS, TOKENS = (64, 128), (2048, 4096)


def make_task(window):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=VOCABULARY,
        image_size=None,
        num_layers=6,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=256,
        intermediate_dim=768,
        head_dim=64,
        use_sliding_window_attention=True,
        sliding_window_size=window,
        vision_encoder=None,
    )
    model = keras_hub.models.Gemma3CausalLM(None, backbone)
    return kpt.SFTTask(model, sequence_length=TOKENS[-1])


class Decode:
    """Calls of a decoder whose slots have `tokens` each."""

    def __init__(self, task, tokens, rings):
        parts = task.policy, task.using_weights
        self.weights = decoding.Weights(
            [x.value for x in task.trainable_variables],
            [x.value for x in task.non_trainable_variables],
            False,
        )
        empty = decoding.empty_layers(*parts, self.weights[:2])
        if not rings:
            empty = [KeyValues(x.keys, x.values) for x in empty]
        self.decoder = decoding.SlotDecoder(*parts, empty, lambda text: None)
        self.decoder.allocate(SLOTS, tokens)
        self.state = decoder_state([None] * SLOTS, 1, False)
        self.state["length"][:] = tokens - decoding.STEPS
        self.state["remaining"][:] = decoding.STEPS
        self.state["active"][:] = True
        self.state["stop"][:] = -1

    def bytes(self):
        arrays = jax.tree.leaves(self.decoder.cache)
        return sum(x.size * x.dtype.itemsize for x in arrays)

    def seconds(self):
        start = time.perf_counter()
        out = self.decoder.decode(self.weights, self.state, 0)
        seconds = time.perf_counter() - start
        assert np.sum(out["taken"]) == SLOTS * decoding.STEPS
        return seconds


def measure(repeats):
    """Returns the figures of each window and cache."""
    found = []
    for window in WINDOWS:
        task = make_task(window)
        for tokens in TOKENS:
            cases = {
                "whole": Decode(task, tokens, False),
                "ring": Decode(task, tokens, True),
            }
            row = {"window": window, "tokens": tokens, "slots": SLOTS}
            row["bytes"] = {k: case.bytes() for k, case in cases.items()}
            row["seconds"] = {k: [] for k in cases}
            for repeat in range(1 + repeats):
                for name, case in cases.items():
                    seconds = case.seconds()
                    # The first time compiles.
                    if repeat:
                        row["seconds"][name].append(seconds)
            found.append(row)
    return found


def table(found):
    lines = [
        "| window | tokens of a slot | MiB of cache, whole | rings | whole / "
        "rings | tokens/s, whole | rings | rings / whole | lowest to highest "
        "|",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in found:
        whole, ring = (x["bytes"][k] for k in ("whole", "ring"))
        seconds = x["seconds"]
        speeds = [
            x["slots"] * decoding.STEPS / statistics.median(seconds[k])
            for k in ("whole", "ring")
        ]
        # Of two calls that follow each other.
        ratios = [a / b for a, b in zip(seconds["whole"], seconds["ring"])]
        lines.append(
            f"| {x['window']} | {x['tokens']:,} | {whole / 2**20:.1f} | "
            f"{ring / 2**20:.1f} | {whole / ring:.1f} | {speeds[0]:.0f} | "
            f"{speeds[1]:.0f} | {statistics.median(ratios):.1f} | "
            f"{min(ratios):.1f} to {max(ratios):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=7).parse_args()
    found = measure(arguments.repeats)
    figures.write(arguments.out, "window_cache", found, table(found))


if __name__ == "__main__":
    main()
