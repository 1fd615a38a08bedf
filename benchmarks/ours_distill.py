"""keras_posttrain: `DistillTask`, from two Hugging Face directories."""

import pathlib
import tempfile

import keras_posttrain as kpt  # sets the backend

# isort: split
import keras
import keras_clock
import preset
import report
import workloads

from keras_posttrain import DistillTask


def main():
    args = report.distill_arguments()
    work = args.work
    with tempfile.TemporaryDirectory() as folder:
        student = pathlib.Path(folder) / "student"
        teacher = pathlib.Path(folder) / "teacher"
        for path in (student, teacher):
            path.mkdir()
        preset.write(work.student, student)
        preset.write(work.teacher, teacher, work.teacher_seed)
        task = DistillTask.from_preset(
            str(student), teacher=str(teacher), sequence_length=work.length
        )
        task.compile(
            optimizer=keras.optimizers.AdamW(
                workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
            ),
            loss=kpt.losses.ForwardKLLoss(),
        )
        mask = [0] + [1] * (work.length - 1)
        clock = keras_clock.Clock()
        # The first epoch is a warm-up.
        task.fit(
            [{"token_ids": x, "completion_mask": mask} for x in args.rows],
            batch_size=work.batch,
            epochs=1 + args.passes,
            shuffle=False,
            callbacks=[clock],
            verbose=0,
        )
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=clock.first["loss"],
        grad_norm=clock.first["grad_norm"],
        first_step_s=clock.first_step_s,
        pass_s=clock.pass_s,
        steps=clock.steps,
    )


if __name__ == "__main__":
    main()
