"""keras_posttrain: `SFTTask`, from a Hugging Face directory."""

import pathlib
import tempfile

import keras_posttrain as kpt  # sets the backend

# isort: split
import keras
import keras_clock
import preset
import report
import workloads

from keras_posttrain import SFTTask


def train(
    shape, rows, passes, *, lora=False, quantize=None, packing=False,
    callbacks=(),
):  # fmt: skip
    """Trains, and returns the task and the clock.

    Args:
        shape: `workloads.Workload`.
        rows: list of token ids and prompt lengths.
        passes: int, epochs after the first one, which is a warm-up.
        lora: bool, whether adapters are trained.
        quantize, packing: those of `SFTTask`.
        callbacks: further ones.
    """
    adapters = kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA)
    with tempfile.TemporaryDirectory() as folder:
        preset.write(shape.model, pathlib.Path(folder))
        task = SFTTask.from_preset(
            folder,
            lora=adapters if lora else None,
            quantize=quantize,
            sequence_length=shape.length,
        )
    task.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        )
    )
    examples = [
        {
            "token_ids": ids,
            "completion_mask": [0] * prompt + [1] * (len(ids) - prompt),
        }
        for ids, prompt in rows
    ]
    clock = keras_clock.Clock()
    task.fit(
        examples,
        batch_size=shape.batch,
        epochs=1 + passes,
        packing=packing,
        shuffle=False,
        callbacks=[clock, *callbacks],
        verbose=0,
    )
    return task, clock


def main():
    args = report.arguments()
    task, clock = train(
        args.shape,
        args.rows,
        args.passes,
        lora=args.lora,
        quantize=args.quantize,
        packing=args.packing,
    )
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=clock.first["loss"],
        weights_gb=sum(v.value.nbytes for v in task.causal_lm.variables)
        / 2**30,
        first_step_s=clock.first_step_s,
        pass_s=clock.pass_s,
        steps=clock.steps,
    )


if __name__ == "__main__":
    main()
