"""`RewardTask`: invariance, scores, files, resume, errors."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, load_json, read_log, weights

MODEL = REFERENCE / "models/qwen3_reward"
PAIRS = load_json("reward.json")["datasets"]["plain"][:6]
ROWS = [
    {"prompt_ids": row["chosen_ids"][:2], "completion_ids": row[side][2:]}
    for row in PAIRS
    for side in ("chosen_ids", "rejected_ids")
]


def make(lora=None, model=MODEL, **kwargs):
    return kpt.RewardTask.from_preset(
        model, lora=lora, sequence_length=64, **kwargs
    )


def one_step(micro_batch_size=None, **fit):
    task = make(kpt.LoRA(rank=4, dropout=0.2))
    rng = np.random.default_rng(0)
    for b in task.adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    before = weights(task)
    task.compile(
        keras.optimizers.SGD(0.01),
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
    )
    task.fit(PAIRS, batch_size=6, shuffle=False, verbose=0, **fit)
    after = weights(task)
    return {k: after[k] - before[k] for k in after}


def test_the_same_update_however_it_is_run():
    update = one_step()
    size = max(np.abs(x).max() for x in update.values())
    assert size > 1e-4 and np.any(update["score/kernel"])
    for ways in (
        {"micro_batch_size": 2},
        {"micro_batch_size": 1, "packing": True, "share_prefix": True},
    ):
        other = one_step(**ways)
        for key, value in update.items():
            np.testing.assert_allclose(
                other[key], value, rtol=0, atol=2e-5 * size, err_msg=key
            )


def trained(directory=None, epochs=4, **callback):
    task = make(kpt.LoRA(rank=4))
    task.compile(keras.optimizers.Adam(5e-3))
    callbacks = []
    if directory is not None:
        callbacks = [
            kpt.callbacks.Checkpoint(directory, every=1),
            kpt.callbacks.MetricsLog(directory),
        ]
    task.fit(
        PAIRS, batch_size=3, epochs=epochs, verbose=0, callbacks=callbacks
    )
    return task


@pytest.fixture(scope="module")
def learned():
    return trained(epochs=8)


def test_it_learns_who_is_ahead(learned):
    scores = np.reshape(learned.score(ROWS), (-1, 2))
    assert (scores[:, 0] > scores[:, 1]).all()
    logs = learned.evaluate(PAIRS)
    assert logs["accuracy"] == 1.0
    np.testing.assert_allclose(
        logs["margin"], (scores[:, 0] - scores[:, 1]).mean(), rtol=1e-4
    )
    base = make()
    for mine, its in zip(
        learned.causal_lm.variables, base.causal_lm.variables
    ):
        np.testing.assert_array_equal(mine.value, its.value)


def test_a_score_is_its_rows_own(learned):
    alone = [learned.score([row])[0] for row in ROWS[:3]]
    np.testing.assert_allclose(
        learned.score(ROWS, batch_size=3)[:3], alone, rtol=1e-4, atol=1e-5
    )


def test_a_reward_of_text(learned):
    reward = kpt.rewards.ModelReward(learned)
    prompt = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "hello"}]
    found = [
        *reward(prompts=[prompt], completions=[answer]),
        *reward(prompts=["2 + 2 ="], completions=[" 4"]),
    ]
    want = [
        *learned.score([{"messages": [*prompt, *answer]}]),
        *learned.score([{"text": "2 + 2 = 4"}]),
    ]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_an_adapter_keeps_its_head(learned, tmp_path):
    learned.save_adapter(tmp_path)
    want = learned.score(ROWS)
    again = make(kpt.LoRA(rank=4))
    again.load_adapter(tmp_path)
    np.testing.assert_allclose(again.score(ROWS), want, rtol=1e-6)
    np.testing.assert_allclose(theirs(tmp_path, MODEL), want, atol=1e-4)


def test_an_export_is_a_model_for_classification(learned, tmp_path):
    learned.export(tmp_path / "model")
    want = learned.score(ROWS)
    again = make(model=tmp_path / "model")
    np.testing.assert_allclose(again.score(ROWS), want, atol=1e-4)
    np.testing.assert_allclose(
        theirs(None, tmp_path / "model"), want, atol=1e-4
    )


def theirs(adapter, model):
    """The scores of transformers, with PEFT's adapter where there is one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, attn_implementation="eager"
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    with torch.no_grad():
        return [
            model(torch.tensor([row["prompt_ids"] + row["completion_ids"]]))
            .logits[0, 0]
            .item()
            for row in ROWS
        ]


def test_a_resumed_run_is_the_straight_one(tmp_path):
    straight = trained(tmp_path / "a", 2)
    trained(tmp_path / "b", 1)
    resumed = trained(tmp_path / "b", 2)
    assert resumed.step == straight.step == 4
    for path, value in weights(straight).items():
        np.testing.assert_array_equal(weights(resumed)[path], value)
    ours, want = read_log(tmp_path / "b"), read_log(tmp_path / "a")
    assert [x["loss"] for x in ours] == [x["loss"] for x in want]


def test_errors(learned, tmp_path):
    with pytest.raises(ValueError, match="loss of scores"):
        make().compile(loss=kpt.losses.DPOLoss())
    with pytest.raises(ValueError, match="Use `export`"):
        learned.save_to_preset(tmp_path / "preset")
    with pytest.raises(ValueError, match="row 0 of `rows` with 70 tokens"):
        learned.score([{"token_ids": [5] * 70, "completion_mask": [1] * 70}])
