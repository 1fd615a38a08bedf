"""Four steps of TRL's DPO, KTO, ORPO and CPO trainers, by `DPOTask`."""

import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, load_json, read_log

losses = kpt.losses
FILES = {name: load_json(f"{name}.json") for name in ("dpo", "kto")}
FILES["free"] = load_json("orpo_cpo_simpo.json")

DIVERGENCES = {
    "reverse_kl": lambda alpha: None,
    "forward_kl": lambda alpha: losses.ForwardKL(),
    "js_divergence": lambda alpha: losses.JensenShannon(),
    "alpha_divergence": losses.AlphaDivergence,
}
PLAIN = {
    "ipo": losses.IPOLoss,
    "nca_pair": losses.NCAPairLoss,
    "bco_pair": losses.BCOPairLoss,
    "sppo_hard": losses.SPPOHardLoss,
    "apo_zero": losses.APOZeroLoss,
    "apo_down": losses.APODownLoss,
}
MARGIN = {
    "sigmoid": losses.DPOLoss,
    "sigmoid_norm": losses.DPOLoss,
    "hinge": losses.HingeLoss,
    "discopop": losses.DiscoPOPLoss,
    "robust": losses.RobustDPOLoss,
    "exo_pair": losses.ExoPairLoss,
}


def dpo_part(name, settings):
    """The loss that one name in TRL's `loss_type` stands for."""
    shared = {"beta": settings["beta"], "ld_alpha": settings.get("ld_alpha")}
    smoothing = {"label_smoothing": settings.get("label_smoothing", 0.0)}
    if name == "sft":
        return losses.ChosenSFTLoss(beta=settings["beta"])
    if name in ("aot", "aot_unpaired"):
        return losses.AOTLoss(paired=name == "aot", **shared, **smoothing)
    shared["use_weighting"] = settings.get("use_weighting", False)
    if name in PLAIN:
        return PLAIN[name](**shared)
    kind = DIVERGENCES[settings.get("f_divergence_type", "reverse_kl")]
    shared["divergence"] = kind(settings.get("f_alpha_divergence_coef"))
    if name in ("robust", "exo_pair"):
        shared |= smoothing
    if name == "sigmoid_norm":
        shared["length_normalized"] = True
    return MARGIN[name](**shared)


def dpo_loss(settings):
    parts = [dpo_part(name, settings) for name in settings["loss_type"]]
    weights = settings.get("loss_weights")
    if settings["loss_type"] == ["sft"]:
        # Its rewards are those of the reference all the same.
        parts = [losses.DPOLoss(beta=settings["beta"]), *parts]
        weights = [0, 1]
    return losses.SumLoss(parts, weights) if len(parts) > 1 else parts[0]


def free_loss(settings):
    beta, kind = settings["beta"], settings.get("loss_type")
    if kind is None:
        return losses.ORPOLoss(beta=beta)
    shared = {"beta": beta, "nll_coef": settings["cpo_alpha"]}
    if kind == "simpo":
        return losses.SimPOLoss(
            gamma=settings["simpo_gamma"],
            alpha=settings.get("alpha", 0.0),
            **shared,
        )
    kinds = {
        "sigmoid": losses.CPOLoss,
        "hinge": losses.CPOHingeLoss,
        "ipo": losses.CPOIPOLoss,
    }
    return kinds[kind](**shared)


def kto_loss(settings):
    unpaired = settings.get("loss_type") == "apo_zero_unpaired"
    loss = losses.APOZeroUnpairedLoss if unpaired else losses.KTOLoss
    names = ("desirable_weight", "undesirable_weight")
    given = {name: settings[name] for name in names if name in settings}
    return loss(beta=settings["beta"], **given)


MAKE = {"dpo": dpo_loss, "kto": kto_loss, "free": free_loss}
# One of each trainer and each kind of reference: the formula of every loss is
# compared with TRL's numbers in `losses/test_preference.py`.
IN_CI = (
    "dpo/qwen3/sigmoid",
    "dpo/llama3/lora_ref_is_initial_adapter",
    "dpo/qwen3/sft",
    "kto/llama3/kto",
    "free/qwen3/orpo",
    "free/llama3/cpo_sigmoid",
    "free/llama3/simpo",
)
CASES = [
    pytest.param(
        file,
        case,
        id=f"{file}/{case['name']}",
        marks=() if f"{file}/{case['name']}" in IN_CI else pytest.mark.full,
    )
    for file, content in FILES.items()
    for case in content["cases"]
]


def train(file, case, directory, **fit):
    inputs, settings = case["inputs"], case["settings"]
    start = inputs.get("adapter_init")
    reference = None
    if "ref_model" in inputs and not start:
        reference = REFERENCE / inputs["ref_model"]
    task = kpt.DPOTask.from_preset(
        REFERENCE / inputs["model"],
        reference=reference,
        lora=kpt.LoRA(rank=4, alpha=8) if start else None,
        sequence_length=settings["max_length"],
    )
    if start:
        task.load_adapter(REFERENCE / start)
    before = [np.array(v.value) for v in task.trainable_variables]
    task.compile(
        optax.adamw(settings["learning_rate"], weight_decay=0.0),
        MAKE[file](settings),
        max_grad_norm=settings["max_grad_norm"],
    )
    task.fit(
        FILES[file]["datasets"][inputs["dataset"].split(".")[1]],
        batch_size=settings["per_device_train_batch_size"],
        shuffle=False,
        verbose=0,
        callbacks=[kpt.callbacks.MetricsLog(directory)],
        **fit,
    )
    squares = (
        np.sum(np.square(v.value - b))
        for v, b in zip(task.trainable_variables, before)
    )
    return read_log(directory), np.sqrt(sum(squares))


@pytest.mark.parametrize("file, case", CASES)
def test_steps_equal_trl(file, case, tmp_path):
    log, change = train(file, case, tmp_path)
    expected = case["expected"]
    assert len(log) == len(expected["per_step"])
    for found, want in zip(log, expected["per_step"]):
        for name, value in want.items():
            # TRL's own means of all logits, and what it does not use.
            if name.startswith("logits/") or (
                name in ("nll_loss", "kl") and value == 0
            ):
                continue
            loose = name == "grad_norm" or name.startswith("rewards/")
            np.testing.assert_allclose(
                found[name],
                value,
                rtol=1e-3 if loose else 2e-4,
                # Rewards are differences of log-probabilities.
                atol=2e-4 if name.startswith("rewards/") else 5e-5,
                err_msg=f"step {want['step']}, {name}",
            )
    want = expected["total_param_delta_norm"]
    np.testing.assert_allclose(change, want, rtol=1e-3)


def test_a_packed_run_with_shared_prompts_equals_trl_too(tmp_path):
    case = FILES["dpo"]["cases"][0]
    log, _ = train("dpo", case, tmp_path, packing=True, share_prefix=True)
    for found, want in zip(log, case["expected"]["per_step"]):
        np.testing.assert_allclose(found["loss"], want["loss"], rtol=2e-4)
