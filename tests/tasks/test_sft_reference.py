"""Numbers of transformers and TRL, through the public API."""

import json

import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.hf.tensors import model_tensors
from tests.support import REFERENCE, load_json

SFT = load_json("sft.json")
CASES = {c["name"]: c for c in SFT["cases"]}


def schedule(settings):
    rate = settings["learning_rate"]
    if settings["lr_scheduler_type"] == "linear":
        return optax.linear_schedule(rate, 0.0, 8)
    return rate


def rows_of(case, settings):
    data = SFT["datasets"][case["inputs"]["dataset"].split(".")[1]]
    whole = not settings.get("completion_only_loss")
    return [
        {
            "token_ids": r["input_ids"],
            "completion_mask": [1] * len(r["input_ids"])
            if whole
            else r["completion_mask"],
        }
        for r in data
    ]


def train(case, directory, **overrides):
    settings = case["settings"]
    family = case["name"].split("/")[0]
    lora = None
    if "lora" in case["name"]:
        lora = kpt.LoRA(rank=4, alpha=8)
    task = kpt.SFTTask.from_preset(
        REFERENCE / case["inputs"]["model"],
        lora=lora,
        sequence_length=settings["max_length"],
        truncation="cut",
        **overrides,
    )
    if lora:
        task.load_adapter(REFERENCE / f"adapters/{family}_lora_r4_init")
    rows = settings["per_device_train_batch_size"]
    packing = bool(settings.get("packing"))
    if packing:
        # TRL lays the packed rows of a batch out in one.
        rows = 2
    accumulate = settings["gradient_accumulation_steps"]
    task.compile(
        optimizer=optax.adamw(
            schedule(settings),
            weight_decay=settings["weight_decay"],
            mask=kpt.decay_mask,
        ),
        loss=kpt.losses.DFTLoss()
        if settings.get("loss_type") == "dft"
        else "auto",
        micro_batch_size=rows if accumulate > 1 else None,
        max_grad_norm=settings["max_grad_norm"] or None,
    )
    before = {
        t.name: np.asarray(t.variable.value)
        for t in model_tensors(task.causal_lm)
    }
    task.fit(
        rows_of(case, settings),
        batch_size=rows * accumulate,
        epochs=2,
        shuffle=False,
        packing=packing,
        verbose=0,
        callbacks=[kpt.callbacks.MetricsLog(directory)],
    )
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return task, [json.loads(line) for line in lines], before


@pytest.mark.parametrize("name", sorted(CASES))
def test_sft_steps_equal_trl(name, tmp_path):
    case = CASES[name]
    task, steps, before = train(case, tmp_path)
    expected = case["expected"]["per_step"]
    assert [s["step"] for s in steps] == [e["step"] for e in expected]
    for step, want in zip(steps, expected):
        np.testing.assert_allclose(step["loss"], want["loss"], atol=3e-5)
        np.testing.assert_allclose(
            step["grad_norm"], want["grad_norm"], rtol=1e-4
        )
        assert step["num_tokens"] == want["num_tokens"]
        if case["settings"]["gradient_accumulation_steps"] == 1:
            # TRL averages these over micro-batches, whatever their tokens.
            for metric in ("entropy", "mean_token_accuracy"):
                np.testing.assert_allclose(
                    step[metric], want[metric], atol=1e-4
                )
    norms = case["expected"].get("final_param_norm_and_delta_norm") or {}
    tensors = model_tensors(task.causal_lm)
    after = {t.name: np.asarray(t.variable.value) for t in tensors}
    for key, (norm, delta) in norms.items():
        if key not in after:
            continue
        change = np.linalg.norm(after[key] - before[key])
        np.testing.assert_allclose(
            np.linalg.norm(after[key]), norm, rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(change, delta, rtol=1e-3, atol=1e-5)
    if "lora" in name:
        same_adapter(task, name.split("/")[0], tmp_path)
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key])
    else:
        assert norms and set(norms) <= set(after)


def same_adapter(task, family, directory):
    from safetensors.numpy import load_file

    task.save_adapter(directory / "adapter")
    ours = load_file(directory / "adapter/adapter_model.safetensors")
    path = REFERENCE / f"adapters/{family}_lora_r4_after"
    theirs = load_file(path / "adapter_model.safetensors")
    assert set(ours) == set(theirs)
    for key in theirs:
        np.testing.assert_allclose(
            ours[key], theirs[key], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(
    "case", load_json("forward.json")["cases"], ids=lambda c: c["name"]
)
def test_log_probs_equal_transformers(case):
    task = kpt.SFTTask.from_preset(
        REFERENCE / case["inputs"]["model"], sequence_length=64
    )
    inputs, expected = case["inputs"], case["expected"]
    lengths = [sum(mask) for mask in inputs["attention_mask"]]
    rows = [
        {"token_ids": ids[:n], "completion_mask": [1] * n}
        for ids, n in zip(inputs["token_ids"], lengths)
    ]
    for found, want, n in zip(
        task.log_probs(rows), expected["next_token_logprobs"], lengths
    ):
        assert found.shape == (n,) and found[0] == 0
        want = np.array(want[: n - 1], "float32")
        np.testing.assert_allclose(found[1:], want, atol=2e-5)


@pytest.mark.parametrize(
    "case", load_json("generation.json")["cases"], ids=lambda c: c["name"]
)
def test_greedy_tokens_equal_transformers(case):
    task = kpt.SFTTask.from_preset(
        REFERENCE / case["inputs"]["model"], sequence_length=64
    )
    found = task.generate(
        [{"prompt_ids": p} for p in case["inputs"]["prompts"]],
        max_tokens=24,
        temperature=0,
        stop_token_ids=None,
        return_token_ids=True,
    )
    assert found == [r["new_ids"] for r in case["expected"]["rows"]]
