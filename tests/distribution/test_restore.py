"""A checkpoint of one mesh resumes on another."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.distribution.runs import directory, mesh
from tests.support import random_rows, read_log, weights

# 5 steps an epoch, a checkpoint after steps 3, 6, 9 and 10.
ROWS, EPOCHS, EVERY = random_rows(40, seed=1), 2, 3
# Where the run is, and the step that it does not survive.
WAYS = {
    "to_one": (("8x1", 5), ("4x2", 8), (None, None)),
    "back": ((None, 5), ("2x4", 8), ("8x1", None)),
    # From two slices of four devices.
    "slices": (("2x4x1", 5), (None, 8), ("8x1", None)),
}


class Killed(Exception):
    pass


class Watch(keras.callbacks.Callback):
    """Notes the state that training begins with, and ends it in a step."""

    def __init__(self, last, saved):
        super().__init__()
        self.last, self.saved, self.first_step = last, saved, None

    def on_epoch_begin(self, epoch, logs=None):
        if self.first_step is not None:
            return
        task = self.model
        self.first_step = task.step
        found = state(task)
        for name, value in self.saved.get(task.step, found).items():
            assert found[name].tobytes() == value.tobytes(), name
        distribution = keras.distribution.distribution()
        if distribution is None:
            return
        for v in [*task.trainable_variables, *task.optimizer.variables]:
            layout = distribution.get_variable_layout(v).backend_layout
            same = v.value.sharding.is_equivalent_to(layout, v.ndim)
            assert same, v.path

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        self.saved[self.model.step] = state(self.model)
        if self.model.step == self.last:
            raise Killed


def state(task):
    """All that a checkpoint holds of weights, masters and moments."""
    variables = [*task.trainable_variables, *task.optimizer.variables]
    return {str(i): np.array(v.value) for i, v in enumerate(variables)}


def make(optimizer, family, mode, way):
    kwargs = {"sequence_length": 64}
    if mode == "lora":
        kwargs["lora"] = kpt.LoRA(rank=4, dropout=0.1)
    if mode == "masters":
        kwargs["dtype"] = "bfloat16"
    task = kpt.SFTTask.from_preset(directory(family), **kwargs)
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(1e-3),
    }
    task.compile(optimizer=made[optimizer]())
    return task


def run(place, case, folder, last=None, saved=None):
    keras.distribution.set_distribution(mesh(place))
    task = make(*case)
    watch = Watch(last, {} if saved is None else saved)
    callbacks = [
        kpt.callbacks.Checkpoint(folder, every=EVERY, keep=1),
        kpt.callbacks.MetricsLog(folder),
        watch,
    ]
    try:
        task.fit(
            ROWS,
            batch_size=8,
            epochs=EPOCHS,
            callbacks=callbacks,
            verbose=0,
        )
    except Killed:
        assert last is not None
    return task, watch.first_step


def check(case, folder):
    straight, _ = run(None, case, folder / "straight")
    saved = {}
    for place, last in WAYS[case[3]]:
        task, first = run(place, case, folder / "moved", last, saved)
    # The newest checkpoint before the step that the last one ended in.
    assert first == 6
    logs = [read_log(folder / name) for name in ("straight", "moved")]
    assert [len(log) for log in logs] == [10, 10]
    rough = case[2] == "masters"
    for one, other in zip(*logs, strict=True):
        for key in ("loss", "grad_norm", "num_tokens"):
            np.testing.assert_allclose(
                other[key],
                one[key],
                rtol=2e-2 if rough else 5e-5,
                err_msg=f"{case} {key} of step {one['step']}",
            )
    if rough:
        return
    pairs = zip(weights(straight).items(), weights(task).values(), strict=True)
    for (name, value), other in pairs:
        np.testing.assert_allclose(
            other,
            value,
            # Adam makes whole steps of the rounding of gradients near zero.
            atol=2e-3 if case[0] == "adamw" else 5e-6,
            err_msg=f"{case} {name}",
        )


# The optimizer; the family; all weights, adapters (`lora`), or bfloat16 with
# float32 masters (`masters`); and the way.
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            ("sgd", "llama3", "full", "to_one"), marks=pytest.mark.full
        ),
        pytest.param(
            ("adamw", "qwen2", "lora", "back"), marks=pytest.mark.full
        ),
        ("adamw", "qwen2-short", "lora", "slices"),
        pytest.param(
            ("adamw", "gemma2", "masters", "to_one"), marks=pytest.mark.full
        ),
        pytest.param(
            ("adamw", "qwen2", "lora", "to_one"), marks=pytest.mark.full
        ),
        pytest.param(
            ("adamw", "qwen3", "full", "back"), marks=pytest.mark.full
        ),
    ],
    ids="-".join,
)
def test_a_run_moves_from_mesh_to_mesh(tmp_path, case):
    check(case, tmp_path)
