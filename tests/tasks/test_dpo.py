"""`DPOTask`: its first step, its reference, its errors."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.training import frozen
from tests.support import REFERENCE, load_json, one_layer, read_log

losses = kpt.losses
PAIRS = load_json("dpo.json")["datasets"]["llama3"][:6]
LABELLED = [
    {k: row[k] for k in ("prompt_ids", "completion_ids", "label")}
    for row in load_json("kto.json")["datasets"]["llama3"][:6]
]
MODEL, OTHER = (
    one_layer(REFERENCE / "models" / x) for x in ("llama3", "llama3_ref")
)


def make(lora=None, reference=None, **kwargs):
    return kpt.DPOTask.from_preset(
        MODEL,
        lora=lora,
        reference=reference,
        sequence_length=64,
        **kwargs,
    )


@pytest.mark.parametrize("lora", [kpt.LoRA(rank=4), None], ids=str)
def test_the_first_step_is_log_2(lora, tmp_path):
    task = make(lora)
    base = [np.array(v.value) for v in task.non_trainable_variables]
    task.compile(keras.optimizers.SGD(0.1))
    assert abs(task.evaluate(PAIRS)["loss"] - np.log(2)) < 1e-6
    task.fit(
        PAIRS,
        batch_size=3,
        verbose=0,
        callbacks=[kpt.callbacks.MetricsLog(tmp_path)],
    )
    first, second = read_log(tmp_path)
    assert abs(first["loss"] - np.log(2)) < 1e-6
    assert first["rewards/accuracies"] == 0
    assert abs(first["rewards/margins"]) < 1e-5
    assert abs(second["loss"] - np.log(2)) > 1e-6
    assert (task.reference.num_bytes == 0) == (lora is not None)
    for v, b in zip(task.non_trainable_variables, base):
        np.testing.assert_array_equal(v.value, b)
    logs = task.evaluate(PAIRS)
    assert "perplexity" not in logs and logs["rewards/margins"] > 0


def test_losses_without_a_reference_make_none():
    task = make(reference=OTHER)
    task.compile(keras.optimizers.SGD(0.1), losses.SimPOLoss())
    task.fit(PAIRS, batch_size=6, verbose=0)
    assert task.reference is None


def test_validation_is_that_of_evaluate():
    task = make(kpt.LoRA(rank=4))
    task.compile(keras.optimizers.SGD(0.5))
    history = task.fit(
        PAIRS[:4], batch_size=4, validation_data=PAIRS[4:], verbose=0
    ).history
    logs = task.evaluate(PAIRS[4:])
    for name in ("loss", "rewards/margins", "rewards/accuracies"):
        np.testing.assert_allclose(
            history[f"val_{name}"][-1], logs[name], rtol=1e-5, atol=1e-7
        )


def test_a_reference_that_follows():
    task = make(kpt.LoRA(rank=4))
    task.compile(keras.optimizers.SGD(0.5))
    follow = kpt.callbacks.UpdateReference(every=1, mixup=1.0)
    programs = frozen._mixed._cache_size()
    task.fit(PAIRS, batch_size=3, epochs=2, verbose=0, callbacks=[follow])
    assert task.step > 2 and frozen._mixed._cache_size() <= programs + 1
    # It has become the policy of the last step.
    assert abs(task.evaluate(PAIRS)["loss"] - np.log(2)) < 1e-6


def refused(function, *parts):
    with pytest.raises(ValueError) as error:
        function()
    for part in parts:
        assert part in str(error.value)


@pytest.fixture(scope="module")
def task():
    return make(kpt.LoRA(rank=4))


def test_losses_that_do_not_fit(task):
    for loss, part in (
        (losses.SFTLoss(), "loss of pairs"),
        (losses.BradleyTerryLoss(), "kpt.RewardTask"),
        (
            losses.SumLoss([losses.DPOLoss(), losses.KTOLoss()]),
            "all be of pairs or all of labelled",
        ),
    ):
        refused(lambda loss=loss: task.compile(loss=loss), part)


def test_data_that_does_not_fit(task):
    task.compile(loss=losses.KTOLoss())
    good = [{**row, "label": True} for row in LABELLED]
    refused(
        lambda: task.fit(good, verbose=0),
        "True in some rows and False in others",
        "label=True in all 6 rows",
    )
    refused(
        lambda: task.fit(LABELLED, batch_size=1, verbose=0),
        "batch_size=1",
        "APOZeroUnpairedLoss",
    )
    refused(lambda: task.fit(PAIRS, verbose=0), "with a label")
    task.compile()
    refused(lambda: task.fit(LABELLED, verbose=0), "KTOLoss")
    refused(
        lambda: task.fit(PAIRS, packing=16, verbose=0),
        "packing=16",
        "room for every pair",
    )
    refused(
        lambda: task.fit(PAIRS, share_prefix="yes", verbose=0),
        "share_prefix='yes'",
    )
    bare = [{**row, "prompt_ids": [], "chosen_ids": [5, 6]} for row in PAIRS]
    refused(
        lambda: task.fit(bare, share_prefix=True, verbose=0),
        "share_prefix=False",
    )


def test_a_reference_of_another_vocabulary():
    lm = load_causal_lm(OTHER)
    lm.backbone.vocabulary_size = 500
    task = make(reference=lm)
    task.compile()
    refused(
        lambda: task.fit(PAIRS, verbose=0),
        "vocabulary_size=500",
        "vocabulary_size=512",
    )
