"""keras_posttrain: episodes of `GRPOTask`, or turns in lock-step."""

import asyncio
import pathlib
import tempfile
import time

import keras_posttrain as kpt  # sets the backend

# isort: split
import agentic_steps
import keras
import preset
import workloads

from keras_posttrain import GRPOTask

WORK = workloads.AGENTIC


class Seconds(keras.callbacks.Callback):
    """Collects the seconds of each rollout."""

    def __init__(self):
        super().__init__()
        self.rollouts = []

    def on_train_batch_end(self, batch, logs=None):
        self.rollouts.append(logs["time/rollout"])


def make_task(folder):
    preset.write(WORK.model, folder, chat=True)
    return GRPOTask.from_preset(
        folder,
        lora=kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA),
        sequence_length=WORK.longest,
    )


def episodes(task, args):
    """Returns the seconds of the rollouts of `fit` and the tokens of one."""

    async def talk(chat, prompt):
        reply = await chat(prompt, max_tokens=WORK.tokens)
        for turn in range(1, WORK.turns):
            await asyncio.sleep(args.tool_seconds)
            reply = await chat(
                WORK.words(WORK.said_words, turn), max_tokens=WORK.tokens
            )
        return float(len(reply.text) % 2)

    task.compile(
        optimizer=keras.optimizers.AdamW(workloads.LEARNING_RATE),
        loss=kpt.losses.DAPOLoss(epsilon_high=None),
        episode=talk,
        num_generations=WORK.samples,
        max_completion_length=2 * WORK.tokens,
        stop_token_ids=None,
    )
    steps = 1 + args.passes
    rows = [
        {"prompt": WORK.words(WORK.prompt_words, 100 + i)}
        for i in range(WORK.prompts * steps)
    ]
    seconds = Seconds()
    history = task.fit(
        rows,
        batch_size=WORK.prompts,
        shuffle=False,
        callbacks=[seconds],
        verbose=0,
    )
    [mean] = history.history["completions/mean_length"]
    return seconds.rollouts, mean * WORK.conversations


def lock_step(task, args):
    """The same turns by `generate`, one call for each turn of all."""
    engine = kpt.rollout.NativeRollout()
    engine.set_model(task)
    engine.sync_weights()
    encode = task.tokenizer.encode
    seconds = []
    for step in range(1 + args.passes):
        start, sampled = time.perf_counter(), 0
        contexts = [[] for _ in range(WORK.conversations)]
        for turn in range(WORK.turns):
            if turn:
                time.sleep(args.tool_seconds)
            requests = []
            for i, ids in enumerate(contexts):
                seed = turn or 100 + step * WORK.prompts + i // WORK.samples
                count = WORK.said_words if turn else WORK.prompt_words
                ids += encode(f"t4 {WORK.words(count, seed)} <end> t4")
                requests.append(
                    kpt.rollout.Request(ids, max_tokens=WORK.tokens, seed=i)
                )
            for ids, [found] in zip(contexts, engine.generate(requests)):
                ids += found.token_ids
                sampled += len(found.token_ids)
        seconds.append(time.perf_counter() - start)
    return seconds, sampled


def main():
    args = agentic_steps.arguments()
    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(pathlib.Path(folder))
        way = lock_step if args.lock_step else episodes
        seconds, tokens = way(task, args)
    agentic_steps.emit(("keras", "keras-hub", "jax"), seconds, tokens)


if __name__ == "__main__":
    main()
