"""Preference losses at the first step of TRL's trainers, through a model."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.policy import Policy
from tests.support import REFERENCE, load_json

losses = kpt.losses
FILES = {
    name: load_json(f"{name}.json")
    for name in ("dpo", "kto", "orpo_cpo_simpo", "reward")
}
NEEDS = ("per_token_logps", "correct", "entropies", "collision_entropies")
NEGLECTED = ("step", "grad_norm", "logits/chosen", "logits/rejected")

# The numbers of preference cases, and the norms of their gradients.
CLOSE = {"rtol": 2e-4, "atol": 5e-5}
NORM_CLOSE = {"rtol": 1e-3}

DIVERGENCES = {
    "reverse_kl": lambda alpha: None,
    "forward_kl": lambda alpha: losses.ForwardKL(),
    "js_divergence": lambda alpha: losses.JensenShannon(),
    "alpha_divergence": losses.AlphaDivergence,
}


def cases(name):
    """All cases of a file but those of adapters, a matter of the task."""
    found = {
        case["name"]: case
        for case in FILES[name]["cases"]
        if "adapter_init" not in case["inputs"]
    }
    return pytest.mark.parametrize("case", found.values(), ids=found.keys())


def layout(sequences, length=32):
    """`(prompt, completion)` in rows of one sequence each."""
    rows = len(sequences)
    batch = {
        "token_ids": np.zeros((rows, length), "int32"),
        "segment_ids": np.zeros((rows, length), "int32"),
        "positions": np.zeros((rows, length), "int32"),
        "completion_mask": np.zeros((rows, length), "float32"),
        "sequence_mask": np.ones((rows, 1), "float32"),
    }
    for row, (prompt, completion) in enumerate(sequences):
        ids = [*prompt, *completion]
        end = len(ids)
        batch["token_ids"][row, :end] = ids
        batch["segment_ids"][row, :end] = 1
        batch["positions"][row, :end] = np.arange(end)
        batch["completion_mask"][row, len(prompt) : end] = 1
    return batch


@functools.cache
def model(name):
    """The outputs of a model for all tokens, and `(outputs, gradients)`."""
    policy = Policy(load_causal_lm(REFERENCE / name))
    variables = policy.causal_lm.trainable_variables
    values = [v.value for v in variables]

    def outputs(values, batch):
        mapping = list(zip(variables, values))
        with keras.StatelessScope(state_mapping=mapping):
            return policy.token_outputs(
                batch, batch["segment_ids"] > 0, needs=NEEDS
            )

    @jax.jit
    def norm(batch, cotangents):
        def weighted(values):
            logps = outputs(values, batch)["per_token_logps"]
            return jnp.sum(logps * cotangents)

        squares = map(jnp.vdot, *(2 * [jax.grad(weighted)(values)]))
        return jnp.sqrt(sum(squares))

    run = jax.jit(outputs)
    return lambda batch: run(values, batch), norm


def check(loss, case, sequences, extras=None):
    """The loss, its metrics and its gradient are those of the first step."""
    batch = layout(sequences)
    compute, norm = model(case["inputs"]["model"])
    outputs = compute(batch)
    inputs = {**batch, **(extras or {})}
    reference = case["inputs"].get("ref_model")
    if reference:
        given = model(reference)[0](batch)["per_token_logps"]
        inputs["ref_per_token_logps"] = given

    def value(logps):
        return loss(inputs, {**outputs, "per_token_logps": logps})

    run = jax.value_and_grad(value, has_aux=True)
    (found, metrics), gradient = run(outputs["per_token_logps"])
    assert set(metrics) <= set(loss.metric_names)
    want = case["expected"]["per_step"][0]
    np.testing.assert_allclose(found, want["loss"], **CLOSE)
    for name, number in want.items():
        if name not in (*NEGLECTED, "loss") and name in metrics:
            np.testing.assert_allclose(
                metrics[name], number, err_msg=name, **CLOSE
            )
    np.testing.assert_allclose(
        norm(batch, gradient), want["grad_norm"], **NORM_CLOSE
    )
    return set(want) - set(metrics) - {*NEGLECTED, "loss"}


def pairs_of(file, case):
    dataset = case["inputs"]["dataset"].split(".")[1]
    rows = FILES[file]["datasets"][dataset]
    count = case["settings"]["per_device_train_batch_size"]
    return [
        (row.get("prompt_ids", []), row[side])
        for row in rows[:count]
        for side in ("chosen_ids", "rejected_ids")
    ]


def dpo_loss(name, settings):
    shared = {
        "beta": settings["beta"],
        "ld_alpha": settings.get("ld_alpha"),
        "use_weighting": settings.get("use_weighting", False),
    }
    smoothing = {"label_smoothing": settings.get("label_smoothing", 0.0)}
    make = DIVERGENCES[settings.get("f_divergence_type", "reverse_kl")]
    divergence = make(settings.get("f_alpha_divergence_coef"))
    margin = {**shared, "divergence": divergence}
    if name == "sft":
        return losses.ChosenSFTLoss(beta=settings["beta"])
    if name in ("aot", "aot_unpaired"):
        del shared["use_weighting"]
        return losses.AOTLoss(paired=name == "aot", **shared, **smoothing)
    if name in ("robust", "exo_pair"):
        of = {"robust": losses.RobustDPOLoss, "exo_pair": losses.ExoPairLoss}
        return of[name](**margin, **smoothing)
    if name in ("sigmoid", "sigmoid_norm", "hinge", "discopop"):
        if name == "discopop" and "discopop_tau" in settings:
            margin["tau"] = settings["discopop_tau"]
        if name == "sigmoid_norm":
            margin["length_normalized"] = True
        of = {"hinge": losses.HingeLoss, "discopop": losses.DiscoPOPLoss}
        return of.get(name, losses.DPOLoss)(**margin)
    of = {
        "ipo": losses.IPOLoss,
        "nca_pair": losses.NCAPairLoss,
        "bco_pair": losses.BCOPairLoss,
        "sppo_hard": losses.SPPOHardLoss,
        "apo_zero": losses.APOZeroLoss,
        "apo_down": losses.APODownLoss,
    }
    return of[name](**shared)


@cases("dpo")
def test_dpo(case):
    settings = case["settings"]
    parts = [dpo_loss(name, settings) for name in settings["loss_type"]]
    weights = settings.get("loss_weights")
    if settings["loss_type"] == ["sft"]:
        # Rewards are reported all the same.
        parts, weights = (
            [losses.DPOLoss(beta=settings["beta"]), *parts],
            [0, 1],
        )
    loss = losses.SumLoss(parts, weights) if len(parts) > 1 else parts[0]
    assert not check(loss, case, pairs_of("dpo", case))


def test_the_alpha_divergence_is_the_papers():
    """TRL 1.16 computes it of 1 - alpha; the paper's value at the first step
    of that disputed case."""
    case = next(
        c for c in FILES["dpo"]["cases"] if "alpha_diverg" in c["name"]
    )
    batch = layout(pairs_of("dpo", case))
    outputs = model("models/qwen3")[0](batch)
    near = model("models/qwen3_near")[0](batch)["per_token_logps"]
    batch["ref_per_token_logps"] = near
    for alpha, want in ((0.3, 0.68836980), (0.7, 0.68984189)):
        divergence = losses.AlphaDivergence(alpha)
        loss = losses.DPOLoss(beta=0.1, divergence=divergence)
        np.testing.assert_allclose(loss(batch, outputs)[0], want, **CLOSE)


@cases("orpo_cpo_simpo")
def test_without_a_reference(case):
    settings = case["settings"]
    beta, kind = settings["beta"], settings.get("loss_type")
    shared = {"beta": beta, "nll_coef": settings.get("cpo_alpha", 1.0)}
    if kind == "simpo":
        loss = losses.SimPOLoss(
            gamma=settings["simpo_gamma"],
            alpha=settings.get("alpha", 0.0),
            label_smoothing=settings.get("label_smoothing", 0.0),
            **shared,
        )
    elif kind == "sigmoid":
        smoothing = settings.get("label_smoothing", 0.0)
        loss = losses.CPOLoss(label_smoothing=smoothing, **shared)
    elif kind in ("hinge", "ipo"):
        of = {"hinge": losses.CPOHingeLoss, "ipo": losses.CPOIPOLoss}
        loss = of[kind](**shared)
    else:
        loss = losses.ORPOLoss(beta=beta)
    if shared["nll_coef"] == 0:
        # TRL reports 0 for what it does not use.
        case["expected"]["per_step"][0].pop("nll_loss")
    assert not check(loss, case, pairs_of("orpo_cpo_simpo", case))


@cases("kto")
def test_kto(case):
    settings = case["settings"]
    dataset = case["inputs"]["dataset"].split(".")[1]
    count = settings["per_device_train_batch_size"]
    rows = FILES["kto"]["datasets"][dataset][:count]
    sides = ("completion_ids", "KL_completion_ids")
    sequences = [(r["prompt_ids"], r[side]) for side in sides for r in rows]
    labels = np.array([[row["label"]] for row in rows] * 2)
    roles = np.repeat([0, 1], count)[:, None]
    of = {"apo_zero_unpaired": losses.APOZeroUnpairedLoss}
    loss = of.get(settings.get("loss_type"), losses.KTOLoss)(
        beta=settings["beta"],
        desirable_weight=settings.get("desirable_weight", 1.0),
        undesirable_weight=settings.get("undesirable_weight", 1.0),
    )
    extras = {"labels": labels, "roles": roles}
    assert check(loss, case, sequences, extras) <= {"kl"}


@cases("reward")
def test_reward_model(case):
    """On the scores that the case gives for its first four pairs."""
    expected, settings = case["expected"], case["settings"]
    key = "scores_before_training_first4_chosen_rejected"
    scores = np.array(expected[key])[:, None]
    dataset = case["inputs"]["dataset"].split(".")[1]
    rows = FILES["reward"]["datasets"][dataset][:4]
    batch = {"sequence_mask": np.ones((8, 1))}
    if "margin" in rows[0]:
        margins = [[row["margin"], 0.0] for row in rows]
        batch["margins"] = np.array(margins).reshape(8, 1)
    center = settings.get("center_rewards_coefficient") or 0.0
    value, metrics = losses.BradleyTerryLoss(center)(batch, {"scores": scores})
    want = expected["per_step"][0]
    np.testing.assert_allclose(value, want["loss"], **CLOSE)
    for name, number in metrics.items():
        np.testing.assert_allclose(number, want[name], **CLOSE)
