"""Numbers of TRL's GRPO through a model: the step of `GRPOTask`."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import Group
from keras_posttrain.rl.batches import rollout_layout
from tests.support import REFERENCE, load_json

CASES = load_json("grpo_model.json")
losses = kpt.losses


def loss_of(settings):
    """Translates TRL's settings."""
    low, high = settings["epsilon_low"], settings["epsilon_high"]
    corrected = settings["use_bias_correction_kl"]
    options = {
        "beta": settings["beta"],
        "kl_estimator": "k3_corrected" if corrected else "k3",
        "entropy_coef": settings["entropy_coef"],
    }
    if settings["top_entropy_quantile"] < 1:
        quantile = settings["top_entropy_quantile"]
        options["masks"] = [losses.TopEntropyMask(quantile)]
    clip = {"epsilon": low, "epsilon_high": high, "delta": settings["delta"]}
    kind = settings["loss_type"]
    if kind == "luspo":
        return losses.LUSPOLoss(**clip, **options)
    if kind == "vespo":
        return losses.VESPOLoss(**options)
    level = settings["importance_sampling_level"]
    options["importance_sampling_level"] = level
    if kind == "cispo":
        return losses.CISPOLoss(max_ratio=high, **options)
    if kind == "sapo":
        return losses.SAPOLoss(**options)
    classes = {
        "grpo": losses.GRPOLoss,
        "bnpo": losses.BNPOLoss,
        "dapo": losses.DAPOLoss,
        "dr_grpo": losses.DrGRPOLoss,
    }
    return classes[kind](**clip, **options)


def batch_of(inputs, settings, layout):
    """The reference's completions, laid out as a rollout's are."""
    groups = []
    for first in range(0, len(inputs["prompt_ids"]), 4):
        ids = inputs["completion_ids"][first : first + 4]
        groups.append(
            Group.of_completions(
                np.array(inputs["prompt_ids"][first], "int32"),
                [np.array(x, "int32") for x in ids],
                [np.ones(len(x), "float32") for x in ids],
                row=first // 4,
            )
        )
    [batch] = rollout_layout(
        num_sequences=8,
        sequence_length=64,
        token_budget=None if layout == "rows" else 48,
        share_prefix=layout == "shared",
        num_generations=4,
    ).minibatches(groups)
    names = ["ref_per_token_logps"]
    if settings["old_logps"] == "given":
        names.append("old_per_token_logps")
    for name in names:
        rows = zip(inputs[name], inputs["completion_ids"])
        batch.put_tokens(name, [x[: len(ids)] for x, ids in rows])
    batch.put_sequences("advantages", inputs["advantages"])
    return batch


def reward(completions):
    return [0.0] * len(completions)


def step_of(case, **settings):
    task = kpt.GRPOTask.from_preset(
        REFERENCE / CASES["inputs"][case["inputs"].split(".")[1]]["model"],
        sequence_length=64,
    )
    task.compile(
        keras.optimizers.SGD(1e-3),
        loss_of(case["settings"]),
        rewards=[reward],
        max_completion_length=case["settings"]["max_completion_length"],
        temperature=case["settings"]["temperature"],
        max_grad_norm=None,
        **settings,
    )
    return task


def state_of(task):
    return {
        "trainable": [v.value for v in task.trainable_variables],
        "frozen": [v.value for v in task.non_trainable_variables],
        "optimizer": [v.value for v in task.optimizer.variables],
        "metrics": [v.value for v in task.metrics_variables],
        "step": np.int32(1),
        "seed": np.int32(0),
    }


PACKED = ("qwen3/grpo_beta0.1", "qwen3/luspo_sequence", "llama3/gspo")
# One of each loss and each setting. The contract of tasks compares layouts,
# and `losses/test_policy.py` all losses on TRL's numbers.
IN_CI = (
    "qwen3/dr_grpo/rows",
    "qwen3/vespo/rows",
    "qwen3/luspo_sequence/rows",
    "qwen3/on_policy_grpo/rows",
    "qwen3/dapo_beta0.1_no_bias_correction/rows",
    "qwen3/grpo_beta0.1/shared",
    "qwen3/top_entropy0.2/rows",
    "qwen3/entropy_coef0.05/rows",
    "qwen3/temperature0.7/rows",
    "llama3/cispo_epsmax5/rows",
    "llama3/gspo/rows",
    "llama3/delta1.3/rows",
)


@pytest.mark.parametrize(
    "case, layout",
    [
        pytest.param(
            c,
            layout,
            id=f"{c['name']}/{layout}",
            marks=() if f"{c['name']}/{layout}" in IN_CI else pytest.mark.full,
        )
        for c in CASES["cases"]
        for layout in ("rows", "packed", "shared")
        if layout == "rows" or c["name"] in PACKED
    ],
)
def test_a_step_equals_trl(case, layout):
    task = step_of(case)
    inputs = CASES["inputs"][case["inputs"].split(".")[1]]
    batch = batch_of(inputs, case["settings"], layout)
    logs, _ = task.train_step(state_of(task), batch.arrays)
    expected = case["expected"]
    np.testing.assert_allclose(
        logs["loss"], expected["loss"], rtol=2e-4, atol=3e-6
    )
    np.testing.assert_allclose(
        logs["grad_norm"], expected["grad_norm"], rtol=2e-4
    )
    for name, value in expected["metrics"].items():
        np.testing.assert_allclose(
            logs[name], value, rtol=2e-4, atol=2e-6, err_msg=name
        )
