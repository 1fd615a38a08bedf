"""keras_posttrain: `DPOTask`, from a Hugging Face directory."""

import pathlib
import tempfile

import keras_posttrain as kpt  # sets the backend

# isort: split
import keras
import keras_clock
import preset
import report
import workloads

from keras_posttrain import DPOTask


def main():
    args = report.pair_arguments("--packing", "--share-prefix")
    work = args.work
    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        preset.write(work.model, pathlib.Path(folder))
        task = DPOTask.from_preset(
            folder,
            lora=kpt.LoRA(
                rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA
            ),
            sequence_length=work.length,
        )
    task.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        loss=kpt.losses.DPOLoss(beta=work.beta),
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    clock = keras_clock.Clock()
    # The first epoch is a warm-up.
    task.fit(
        [dict(zip(names, pair, strict=True)) for pair in args.pairs],
        batch_size=work.batch,
        epochs=1 + args.passes,
        packing=args.packing,
        share_prefix=args.share_prefix,
        shuffle=False,
        callbacks=[clock],
        verbose=0,
    )
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=clock.first["loss"],
        first_step_s=clock.first_step_s,
        pass_s=clock.pass_s,
        steps=clock.steps,
        chosen_logp=clock.first["logps/chosen"],
        rejected_logp=clock.first["logps/rejected"],
        grad_norm=clock.first["grad_norm"],
    )


if __name__ == "__main__":
    main()
