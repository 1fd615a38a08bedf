"""The loss of a mixture's routers: one number, however a batch is run."""

import functools

import keras
import numpy as np
import pytest
import torch
import transformers

import keras_posttrain as kpt
from tests.models.mixtures import make_mixture
from tests.models.tiny_checkpoints import make_checkpoint
from tests.support import random_rows, read_log, spread_adapter, weights
from tests.tasks.contract import Record, odd

ROWS = random_rows(8, seed=1, vocabulary=90)
# Large, so that a wrong part of the gradient would be seen.
LOSS = kpt.losses.RouterLoss(balance=0.5, z=0.05)
METRICS = kpt.losses.RouterLoss.metric_names


def random_pairs(count=4):
    rng = np.random.default_rng(0)
    lengths = {"prompt_ids": 9, "chosen_ids": 5, "rejected_ids": 7}
    return [
        {k: rng.integers(3, 90, n).tolist() for k, n in lengths.items()}
        for _ in range(count)
    ]


PAIRS = random_pairs()
LABELLED = [
    {
        "prompt_ids": pair["prompt_ids"],
        "completion_ids": pair[f"{side}_ids"],
        "label": side == "chosen",
    }
    for pair, side in zip(PAIRS, ["chosen", "rejected"] * 2)
]
PROMPTS = [{"prompt_ids": pair["prompt_ids"]} for pair in PAIRS[:2]]
TASKS = {
    "sft": (kpt.SFTTask, ROWS, {}),
    "dpo": (kpt.DPOTask, PAIRS, {}),
    "kto": (kpt.DPOTask, LABELLED, {"loss": kpt.losses.KTOLoss()}),
    "grpo": (
        kpt.GRPOTask,
        PROMPTS,
        {
            "rewards": [odd],
            "num_generations": 4,
            "max_completion_length": 6,
            "stop_token_ids": range(3, 30),
        },
    ),
}


def one_step(name, router_loss=LOSS, lora=None, remat="none", **way):
    """One step of SGD: its logs and the update."""
    kind, rows, compiled = TASKS[name]
    task = kind(
        make_mixture("Qwen3Moe", num_experts=4),
        sequence_length=48,
        lora=lora,
        remat=remat,
    )
    if lora is not None:
        spread_adapter(task)
    before, record = list(weights(task).values()), Record()
    task.compile(
        keras.optimizers.SGD(0.1),
        router_loss=router_loss,
        micro_batch_size=way.pop("micro_batch_size", None),
        max_grad_norm=None,
        **compiled,
    )
    fit = {"batch_size": len(rows), "shuffle": False, "verbose": 0, **way}
    task.fit(rows, callbacks=[record], **fit)
    (logs,) = record.steps
    changes = [b - a for a, b in zip(before, weights(task).values())]
    return logs, dict(zip(weights(task), changes))


plain_step = functools.cache(one_step)


def assert_same_step(one, other, bound=2e-5):
    (logs, update), (other_logs, other_update) = one, other
    for name in ("loss", "grad_norm", *METRICS):
        np.testing.assert_allclose(
            other_logs[name], logs[name], rtol=bound, err_msg=name
        )
    size = max(np.abs(x).max() for x in update.values())
    pairs = zip(update.items(), other_update.values(), strict=True)
    for (path, value), found in pairs:
        np.testing.assert_allclose(
            found, value, rtol=0, atol=bound * size + 2e-7, err_msg=path
        )


@pytest.mark.parametrize(
    "name, way",
    [
        (
            "sft",
            {
                "packing": True,
                "batch_size": 4,
                "micro_batch_size": 2,
                "remat": "full",
            },
        ),
        # The reference is a copy that shares the policy's layers.
        ("dpo", {"share_prefix": True, "packing": 40, "micro_batch_size": 1}),
        # A loss that couples the batch: two passes.
        ("kto", {"micro_batch_size": 2}),
        ("grpo", {"share_prefix": True, "micro_batch_size": 4}),
    ],
    ids=TASKS,
)
def test_a_step_is_the_same_however_it_is_run(name, way):
    plain = plain_step(name)
    assert_same_step(plain, one_step(name, **way))


def test_it_is_added_to_the_loss():
    """What is added is of the size that the metrics say, and is trained."""
    (logs, update), (other_logs, other_update) = (
        plain_step("sft"),
        one_step("sft", None),
    )
    for name in METRICS:
        np.testing.assert_allclose(logs[name], other_logs[name], rtol=1e-6)
    more = 0.5 * logs["router_balance_loss"] + 0.05 * logs["router_z_loss"]
    np.testing.assert_allclose(
        logs["loss"], other_logs["loss"] + more, rtol=1e-6
    )
    assert 2.0 <= logs["router_balance_loss"] <= 4.0
    assert 1.0 <= logs["expert_load_max"] <= 2.0
    for path, value in update.items():
        if "feedforward_gate" in path and value.shape == (32, 4):
            assert np.abs(value - other_update[path]).max() > 1e-4, path


def test_an_adapter_below_a_frozen_router_is_trained():
    lora = kpt.LoRA(rank=2, targets="q_proj")
    found = [one_step("sft", x, lora)[1] for x in (LOSS, None)]
    assert all("lora" in path for path in found[0])
    for path, value in found[0].items():
        assert np.abs(value - found[1][path]).max() > 1e-6, path


def test_eight_devices_are_one(eight_devices):
    plain = plain_step("sft")
    layout = kpt.distribution.fsdp_tensor_parallel(4, 2)
    keras.distribution.set_distribution(layout)
    found = one_step("sft", micro_batch_size=4)
    assert_same_step(plain, found, 1e-4)


def test_a_step_equals_that_of_transformers(tmp_path):
    """Loss, its part of the routers, and the gradients of these, of rows of
    unequal lengths in one micro-batch."""
    directory, _ = make_checkpoint(tmp_path / "model", "mixtral")
    rows = random_rows(4, seed=2, vocabulary=90)
    for row in rows:
        row["completion_mask"] = [1] * len(row["token_ids"])
    length = max(len(row["token_ids"]) for row in rows)
    ids = torch.zeros((4, length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["token_ids"])] = torch.tensor(row["token_ids"])
        mask[i, : len(row["token_ids"])] = 1
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    model.router_aux_loss_coef = 0.5
    out = model(
        ids,
        attention_mask=mask,
        labels=torch.where(mask == 1, ids, -100),
        output_router_logits=True,
    )
    out.loss.backward()
    task = kpt.SFTTask.from_preset(directory, tokenizer=None)
    task.compile(
        keras.optimizers.SGD(1.0),
        router_loss=kpt.losses.RouterLoss(0.5, per_layer=False),
        max_grad_norm=None,
    )
    before, record = weights(task), Record()
    task.fit(rows, batch_size=4, verbose=0, callbacks=[record])
    (logs,) = record.steps
    np.testing.assert_allclose(
        logs["router_balance_loss"], out.aux_loss.item(), rtol=1e-5
    )
    np.testing.assert_allclose(logs["loss"], out.loss.item(), rtol=1e-5)
    after = weights(task)
    ours = [
        before[path] - after[path]
        for path in before
        if before[path].shape == (32, 4)
    ]
    gates = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("gate.weight")
    ]
    assert len(ours) == len(gates) == 2
    for value, gate in zip(ours, gates):
        want = gate.grad.numpy().T
        bound = 2e-5 * np.abs(want).max()
        np.testing.assert_allclose(value, want, rtol=0, atol=bound)


def test_evaluation_leaves_it_out():
    task = kpt.SFTTask(make_mixture("Mixtral"), sequence_length=48)
    found = []
    for router_loss in (None, LOSS):
        task.compile(router_loss=router_loss)
        found.append(task.evaluate(ROWS, verbose=0))
    assert found[0] == found[1]
    np.testing.assert_allclose(
        found[0]["perplexity"], np.exp(found[0]["loss"]), rtol=1e-6
    )


def one_sided(steps, router_loss):
    """Trains a mixture all of whose tokens choose two experts of eight."""
    causal_lm = make_mixture("Mixtral", num_experts=8, num_layers=2)
    for layer in causal_lm.backbone.transformer_layers:
        # A part that all tokens share, which the router reads.
        kernel = layer._sparse_moe_block._sparse_feedforward_gate_dense.kernel
        value = 0.2 * np.array(kernel)
        value[0] = np.linspace(3, -3, 8)
        kernel.assign(value)
    embeddings = causal_lm.backbone.token_embedding.embeddings
    value = np.array(embeddings)
    value[:, 0] = 3.0
    embeddings.assign(value)
    task = kpt.SFTTask(causal_lm, sequence_length=48)
    task.compile(keras.optimizers.Adam(0.01), router_loss=router_loss)
    record = Record()
    task.fit(ROWS, batch_size=8, epochs=steps, verbose=0, callbacks=[record])
    return [log["expert_load_max"] for log in record.steps]


def test_an_unbalanced_router_becomes_balanced():
    with_loss = one_sided(24, kpt.losses.RouterLoss(balance=0.3))
    without = one_sided(24, None)
    print(with_loss, without)
    assert with_loss[0] == without[0] > 3.5
    assert with_loss[-1] < 2.0 < 3.0 < without[-1]


def run(directory, router_loss=LOSS, epochs=4):
    task = kpt.SFTTask(make_mixture("Mixtral"), sequence_length=48)
    task.compile(
        keras.optimizers.Adam(1e-3),
        router_loss=router_loss,
        micro_batch_size=2,
    )
    callbacks = [
        kpt.callbacks.MetricsLog(directory),
        kpt.callbacks.Checkpoint(directory, every=1),
    ]
    fit = {"batch_size": 4, "verbose": 0, "callbacks": callbacks}
    task.fit(ROWS, epochs=epochs, **fit)
    return task


def test_a_run_resumes_bit_for_bit(tmp_path):
    straight = run(tmp_path / "straight")
    run(tmp_path / "parts", epochs=2)
    resumed = run(tmp_path / "parts")
    pairs = zip(weights(straight).values(), weights(resumed).values())
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
    names = ("step", "loss", *METRICS)
    logs = [
        [{name: line[name] for name in names} for line in read_log(folder)]
        for folder in (tmp_path / "straight", tmp_path / "parts")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 8
    with pytest.raises(ValueError, match="router_loss differs"):
        run(tmp_path / "parts", None)
