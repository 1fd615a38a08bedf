"""A user's script that samples with vLLM, as it is started on every host.

`two_trainers.py DIRECTORY PORT INDEX CASE...`: runs the cases one after the
other, and the first process writes what came of each to `DIRECTORY/CASE.npz`.
The tests call `outcome` for the same in one process. The servers' addresses
and their key are in the environment variables URLS and KEY.
"""

import json
import os
import pathlib
import sys

import keras

if __name__ == "__main__":
    keras.distribution.initialize(
        f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3])
    )

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from keras_posttrain.rollout import VLLMRollout  # noqa: E402
from tests.distribution.two_processes import trained  # noqa: E402
from tests.distribution.two_processes import write_programs  # noqa: E402
from tests.support import REFERENCE  # noqa: E402
from tests.vllm.models import compile_grpo, make, prompts  # noqa: E402


class Seen(keras.callbacks.Callback):
    """Completions that were trained on, and logs."""

    def __init__(self):
        super().__init__()
        self.rows, self.logs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append(self.model.last_rollout["completion"])
        self.logs.append(logs)


def engine_of(**settings):
    servers = {"urls": os.environ["URLS"].split(), "api_key": os.environ["KEY"]}
    if "python" in settings:
        servers = {}
    return VLLMRollout(**servers, timeout=120, **settings)


def distribute():
    if processes.count() > 1:
        keras.distribution.set_distribution(kpt.distribution.fsdp())


def train(mode):
    """GRPO with all weights, sent as differences, or with an adapter."""
    distribute()
    task, seen = make("qwen3", mode == "lora", sequence_length=256), Seen()
    settings = {"python": sys.executable} if mode == "python" else {}
    compile_grpo(task, engine_of(push="delta", **settings), 0.3)
    task.fit(prompts(12), batch_size=4, callbacks=[seen], verbose=0)
    found = trained(task)
    for name in ("reward", "vllm/sync_bytes", "loss"):
        found[name] = [logs[name] for logs in seen.logs]
    print([logs["vllm/probe_difference"] for logs in seen.logs])
    return {**found, "rows": json.dumps(seen.rows)}


KINDS = {f.__name__: f for f in (train,)}


def outcome(case):
    """Runs `kind:arguments`; a dict of what came of it."""
    kind, *arguments = case.split(":")
    return KINDS[kind](*arguments)


if __name__ == "__main__":
    write_programs()
    for case in sys.argv[4:]:
        found = outcome(case)
        if processes.is_first():
            np.savez(pathlib.Path(sys.argv[1]) / f"{case}.npz", **found)
    print("done", flush=True)
