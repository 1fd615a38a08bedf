"""keras_posttrain: `GRPOTask`, from a Hugging Face directory."""

import functools
import pathlib
import statistics
import tempfile

import keras_posttrain as kpt  # sets the backend

# isort: split
import grpo_steps
import jax.numpy as jnp
import keras
import numpy as np
import preset
import workloads

from keras_posttrain.rollout import NativeRollout, VLLMRollout

ENGINES = {"native": NativeRollout, "vllm": VLLMRollout}


class Clock(keras.callbacks.Callback):
    """Records the end of every step and the seconds of its parts."""

    def __init__(self, log):
        super().__init__()
        self.log, self.logs = log, []

    def on_train_batch_end(self, batch, logs=None):
        parts = {part: logs[f"time/{part}"] for part in grpo_steps.PARTS}
        self.logs.append(logs)
        self.log.step_ends(**parts)


class Task(kpt.GRPOTask):
    """Also reports a projection of the whole gradient."""

    def loss_and_gradients(self, state, batch):
        gradients, logs = super().loss_and_gradients(state, batch)
        flat = jnp.concatenate([jnp.ravel(g) for g in gradients])
        logs["projection"] = jnp.vdot(flat, jnp.cos(jnp.arange(flat.size)))
        return gradients, logs


def counted(log, generate, requests):
    """Returns the engine's completions, and records the number of tokens."""
    out = generate(requests)
    logps = [c.per_token_logps for group in out for c in group]
    flat = np.concatenate(logps)
    log.record_tokens(len(flat), flat.sum(dtype="float64"))
    return out


def main():
    parser = grpo_steps.parser()
    parser.add_argument(
        "--share-prefix",
        action="store_true",
        help="a row is a prompt, once, and its completions",
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="native")
    args = grpo_steps.arguments(parser)
    work, log = args.work, grpo_steps.Log()
    length = work.group if args.share_prefix else work.longest
    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        preset.write(work.model, pathlib.Path(folder))
        task = Task.from_preset(
            folder,
            lora=kpt.LoRA(
                rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA
            ),
            sequence_length=length,
        )

    def even_share(completion_ids, **columns):
        return [log.reward(ids) for ids in completion_ids]

    engine = ENGINES[args.engine]()
    engine.generate = functools.partial(counted, log, engine.generate)
    task.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        loss=kpt.losses.DAPOLoss(epsilon_high=None),
        rewards=[even_share],
        rollout=engine,
        num_generations=work.samples,
        max_completion_length=work.max_tokens,
        stop_token_ids=None,
    )
    rows = [{"prompt_ids": ids} for ids in work.prompt_ids(args.steps)]
    clock = Clock(log)
    log.start()
    task.fit(
        rows,
        batch_size=work.prompts,
        shuffle=False,
        callbacks=[clock],
        share_prefix=args.share_prefix,
        verbose=0,
    )
    grpo_steps.emit(
        args,
        ("keras", "keras-hub", "jax"),
        log,
        first_loss=clock.logs[0]["loss"],
        grad_norm=statistics.median(x["grad_norm"] for x in clock.logs),
        first_gradient=[clock.logs[0][x] for x in ("grad_norm", "projection")],
        programs=getattr(engine, "programs", None),
    )


if __name__ == "__main__":
    main()
