"""`RewardTask`: scores, files, errors."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, load_json

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


@pytest.fixture(scope="module")
def learned():
    task = make(kpt.LoRA(rank=4))
    task.compile(keras.optimizers.Adam(5e-3))
    task.fit(PAIRS, batch_size=3, epochs=8, verbose=0)
    return task


def test_it_learns_which_is_better(learned):
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


def test_errors(learned, tmp_path):
    with pytest.raises(ValueError, match="loss of scores"):
        make().compile(loss=kpt.losses.DPOLoss())
    with pytest.raises(ValueError, match="Use `export`"):
        learned.save_to_preset(tmp_path / "preset")
    with pytest.raises(ValueError, match="row 0 of `rows` with 70 tokens"):
        learned.score([{"token_ids": [5] * 70, "completion_mask": [1] * 70}])
