"""Conversations of several turns with a slow tool, ours only.

    python benchmarks/agentic.py
    python benchmarks/agentic.py --conversations 64 --turns 4 --tool-seconds 1

Each conversation samples a turn, waits for a tool, is told what the tool said
and samples the next turn. Four ways are timed in one process, after one run of
each that is not:

- *session*: all conversations at once in a session of the built-in engine.
- *no tool*: the same with a tool that takes no time: sampling alone.
- *lock-step*: all conversations sample a turn by `generate`, then all tools
  run at once, as in TRL's loop. Everything is computed again each turn.
- *sessions by generate*: the session that the base class makes of `generate`.

The bound for *session* is *no tool* plus one chain of tools. The table is
written to `results/agentic.md` and the figures to `results/agentic.json`.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import statistics
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras_posttrain as kpt

# isort: split
import preset
import workloads

from keras_posttrain.rollout.session import Session

FOLDER = pathlib.Path(__file__).parent
OPENING, SAID = 64, 24


def said(seed, turn, vocabulary):
    """What a conversation is told: token ids."""
    count = SAID if turn else OPENING
    return random.Random(f"{seed} {turn}").choices(
        range(3, vocabulary), k=count
    )


def request(ids, seed, turn, arguments):
    return kpt.rollout.Request(
        ids, max_tokens=arguments.tokens, seed=1000 * seed + turn
    )


async def converse(session, seed, arguments, seconds):
    ids = []
    for turn in range(arguments.turns):
        ids = [*ids, *said(seed, turn, arguments.vocabulary)]
        future = session.submit(request(ids, seed, turn, arguments))
        [completion] = await asyncio.wrap_future(future)
        ids = [*ids, *completion.token_ids]
        if turn + 1 < arguments.turns:
            await asyncio.sleep(seconds)
    session.release(ids)
    return ids


def at_once(session, arguments, seconds):
    """Runs all conversations in a session; returns seconds and tokens."""

    async def run():
        return await asyncio.gather(
            *(
                converse(opened, seed, arguments, seconds)
                for seed in range(arguments.conversations)
            )
        )

    start = time.perf_counter()
    with session as opened:
        found = asyncio.run(run())
    return time.perf_counter() - start, found


def lock_step(engine, arguments):
    start = time.perf_counter()
    all_ids = [[] for _ in range(arguments.conversations)]
    for turn in range(arguments.turns):
        for seed, ids in enumerate(all_ids):
            ids += said(seed, turn, arguments.vocabulary)
        found = engine.generate(
            [
                request(ids, seed, turn, arguments)
                for seed, ids in enumerate(all_ids)
            ]
        )
        for ids, [completion] in zip(all_ids, found):
            ids += completion.token_ids
        if turn + 1 < arguments.turns:
            time.sleep(arguments.tool_seconds)
    return time.perf_counter() - start, all_ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    work = workloads.RL["w5"]
    length = OPENING + arguments.turns * (SAID + arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        preset.write(work.model, pathlib.Path(folder))
        task = kpt.SFTTask.from_preset(folder, sequence_length=length)
    arguments.vocabulary = task.causal_lm.backbone.vocabulary_size
    engine = kpt.rollout.NativeRollout()
    engine.set_model(task)
    engine.sync_weights()
    tool = arguments.tool_seconds
    ways = {
        "no tool": lambda: at_once(engine.session(), arguments, 0.0),
        "session": lambda: at_once(engine.session(), arguments, tool),
        "lock-step": lambda: lock_step(engine, arguments),
        "sessions by generate": lambda: at_once(
            Session(engine), arguments, tool
        ),
    }
    # Compiles.
    tokens = {name: way()[1] for name, way in ways.items()}
    if any(x != tokens["no tool"] for x in tokens.values()):
        raise SystemExit("The ways sampled different tokens.")
    times = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            times[name].append(way()[0])
    seconds = {name: statistics.median(x) for name, x in times.items()}
    bound = seconds["no tool"] + (arguments.turns - 1) * tool
    records = [
        {"way": name, "seconds": s, "of the bound": s / bound}
        for name, s in seconds.items()
    ]
    lines = [
        "| way | s | over sampling and one chain of tools |",
        "|---|---|---|",
    ]
    lines += [
        f"| {r['way']} | {r['seconds']:.2f} | {r['of the bound']:.2f} |"
        for r in records
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "agentic.md").write_text(text)
    (arguments.out / "agentic.json").write_text(
        json.dumps(records, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
