"""keras_posttrain: `SFTTask`, from a Hugging Face directory."""

import pathlib
import tempfile
import time

import keras_posttrain as kpt  # sets the backend

# isort: split
import keras
import preset
import report
import workloads


class Clock(keras.callbacks.Callback):
    """The first step's loss and end, and the end of every epoch.

    Reading a loss waits for its step, which JAX only has begun.
    """

    def __init__(self):
        super().__init__()
        self.ends, self.steps = [], 0
        self.first_loss = None

    def on_train_batch_end(self, batch, logs=None):
        if self.first_loss is None:
            self.first_loss = float(logs["loss"])
            self.first_end = time.perf_counter()
        self.steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])
        self.ends.append(time.perf_counter())


def main():
    args = report.arguments()
    with tempfile.TemporaryDirectory() as folder:
        preset.write(args.shape.model, pathlib.Path(folder))
        lora = kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA)
        task = kpt.SFTTask.from_preset(
            folder,
            lora=lora if args.lora else None,
            sequence_length=args.shape.length,
        )
    task.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        )
    )
    rows = [
        {
            "token_ids": ids,
            "completion_mask": [0] * prompt + [1] * (len(ids) - prompt),
        }
        for ids, prompt in args.rows
    ]
    clock = Clock()
    start = time.perf_counter()
    # The first epoch is the warm-up.
    task.fit(
        rows,
        batch_size=args.shape.batch,
        epochs=1 + args.passes,
        packing=args.packing,
        shuffle=False,
        callbacks=[clock],
        verbose=0,
    )
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=clock.first_loss,
        first_step_s=clock.first_end - start,
        pass_s=[
            b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)
        ],
        steps=clock.steps,
    )


if __name__ == "__main__":
    main()
