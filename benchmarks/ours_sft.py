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


def main():
    args = report.arguments()
    with tempfile.TemporaryDirectory() as folder:
        preset.write(args.shape.model, pathlib.Path(folder))
        lora = kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA)
        task = SFTTask.from_preset(
            folder,
            lora=lora if args.lora else None,
            quantize=args.quantize,
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
    clock = keras_clock.Clock()
    # The first epoch is a warm-up.
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
        first_loss=clock.first["loss"],
        weights_gb=sum(v.value.nbytes for v in task.causal_lm.variables)
        / 2**30,
        first_step_s=clock.first_step_s,
        pass_s=clock.pass_s,
        steps=clock.steps,
    )


if __name__ == "__main__":
    main()
