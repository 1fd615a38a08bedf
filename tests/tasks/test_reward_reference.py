"""Four steps of TRL's reward trainer, by `RewardTask`."""

import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, load_json, read_log

REWARD = load_json("reward.json")
CLOSE = {"rtol": 2e-4, "atol": 5e-5}


@pytest.mark.parametrize("case", REWARD["cases"], ids=lambda c: c["name"])
def test_steps_equal_trl(case, tmp_path):
    inputs, settings = case["inputs"], case["settings"]
    rows = REWARD["datasets"][inputs["dataset"].split(".")[1]]
    task = kpt.RewardTask.from_preset(
        REFERENCE / inputs["model"], sequence_length=settings["max_length"]
    )
    first = [
        {"prompt_ids": [], "completion_ids": row[side]}
        for row in rows[:4]
        for side in ("chosen_ids", "rejected_ids")
    ]
    expected = case["expected"]
    np.testing.assert_allclose(
        task.score(first),
        expected["scores_before_training_first4_chosen_rejected"],
        **CLOSE,
    )
    before = [np.array(v.value) for v in task.trainable_variables]
    center = settings.get("center_rewards_coefficient") or 0.0
    task.compile(
        optax.adamw(settings["learning_rate"], weight_decay=0.0),
        kpt.losses.BradleyTerryLoss(center),
        max_grad_norm=settings["max_grad_norm"],
    )
    task.fit(
        rows,
        batch_size=settings["per_device_train_batch_size"],
        shuffle=False,
        verbose=0,
        callbacks=[kpt.callbacks.MetricsLog(tmp_path)],
    )
    log = read_log(tmp_path)
    assert len(log) == len(expected["per_step"])
    for found, want in zip(log, expected["per_step"]):
        np.testing.assert_allclose(
            found["grad_norm"], want.pop("grad_norm"), rtol=1e-3
        )
        for name, value in want.items():
            np.testing.assert_allclose(
                found[name], value, err_msg=name, **CLOSE
            )
    squares = (
        np.sum(np.square(v.value - b))
        for v, b in zip(task.trainable_variables, before)
    )
    np.testing.assert_allclose(
        np.sqrt(sum(squares)), expected["total_param_delta_norm"], rtol=1e-3
    )
