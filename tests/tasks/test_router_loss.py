"""The loss of a mixture's routers: one number, however a batch is run."""

import functools

import jax
import keras
import numpy as np
import pytest
import torch
import transformers

import keras_posttrain as kpt
from keras_posttrain.training.frozen import frozen_policy
from keras_posttrain.training.weights import ModelWeights
from tests.distribution import runs
from tests.models.mixtures import make_mixture
from tests.models.tiny_checkpoints import GEMMA4_EXPERTS, make_checkpoint
from tests.support import (
    random_rows,
    read_log,
    spread_adapter,
    starts_again,
    weights,
)
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
PROMPTS = [{"prompt_ids": pair["prompt_ids"]} for pair in PAIRS[:2]]
TASKS = {
    "sft": (kpt.SFTTask, ROWS, {}),
    # It couples the pairs of a batch: two passes over micro-batches.
    "dpo": (kpt.DPOTask, PAIRS, {"loss": kpt.losses.AOTLoss()}),
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
        make_mixture(
            "Qwen3Moe",
            num_experts=4,
            num_layers=2 if name == "sft" else 1,
            mlp_only_layers=[],
        ),
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
        pytest.param(
            "dpo",
            {"share_prefix": True, "micro_batch_size": 2},
            marks=pytest.mark.full,
        ),
        ("grpo", {"share_prefix": True, "micro_batch_size": 4}),
    ],
    ids=TASKS,
)
def test_a_step_is_the_same_however_it_is_run(name, way):
    plain = plain_step(name)
    assert_same_step(plain, one_step(name, **way))


def test_it_is_added_to_the_loss_and_reaches_an_adapter():
    """With the weights that are set, below routers that are frozen."""
    lora = kpt.LoRA(rank=2, targets="q_proj")
    (logs, update), (other_logs, other_update) = (
        one_step("sft", router_loss, lora) for router_loss in (LOSS, None)
    )
    for name in METRICS:
        np.testing.assert_allclose(logs[name], other_logs[name], rtol=1e-6)
    more = 0.5 * logs["router_balance_loss"] + 0.05 * logs["router_z_loss"]
    np.testing.assert_allclose(
        logs["loss"], other_logs["loss"] + more, rtol=1e-6
    )
    # Of two of four experts at most all tokens choose the same.
    assert 1.0 < logs["expert_load_max"] <= 2.0
    assert logs["expert_unused_ratio"] in (0.0, 0.125, 0.25)
    for path, value in update.items():
        assert "lora" in path
        assert np.abs(value - other_update[path]).max() > 1e-6, path


def test_what_a_frozen_model_computes_is_not_recorded():
    """A teacher or reference may be the policy at another time."""
    task = kpt.SFTTask(make_mixture("Mixtral"), sequence_length=48)
    weights = ModelWeights.of(task)
    teacher = frozen_policy(task.policy, weights)
    ids = np.ones((1, 8), "int32")
    batch = dict.fromkeys(("token_ids", "segment_ids", "positions"), ids)
    found = []

    def run(values, trainable, frozen):
        with task.policy.recorded_routing() as layers:
            with teacher.using(values, trainable, frozen):
                teacher.policy.hidden_states(batch)
            found.append(len(layers))
            task.policy.hidden_states(batch)
            found.append(len(layers))

    jax.eval_shape(run, teacher.values, *weights.values())
    assert found == [0, 2]


@pytest.mark.parametrize(
    "mesh", [pytest.param("4x2", marks=pytest.mark.full), "ep4"]
)
def test_eight_devices_are_one(mesh, eight_devices):
    plain = plain_step("sft")
    keras.distribution.set_distribution(runs.mesh(mesh))
    found = one_step("sft", micro_batch_size=4)
    assert keras.distribution.distribution() is not None
    assert_same_step(plain, found, 1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_step_equals_that_of_transformers(family, tmp_path):
    """Loss, its part of the routers, and the gradients of these, of rows of
    unequal lengths in one micro-batch."""
    directory, _ = make_checkpoint(tmp_path / "model", family)
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
    task = kpt.SFTTask.from_preset(directory, sequence_length=64)
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
        if name.endswith(("gate.weight", "router.weight"))
    ]
    assert len(ours) == len(gates) == 2
    for value, gate in zip(ours, gates):
        want = gate.grad.numpy().T
        bound = 2e-5 * np.abs(want).max()
        np.testing.assert_allclose(value, want, rtol=0, atol=bound)


def test_gemma4s_routers_are_recorded(tmp_path):
    """transformers has no router loss of it: logits of its own routers."""
    directory, _ = make_checkpoint(
        tmp_path / "model", "gemma4_text", **GEMMA4_EXPERTS
    )
    row = {"token_ids": [5, 17, 80, 33, 2], "completion_mask": [1] * 5}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    logits = []
    for layer in model.model.layers:
        layer.router.proj.register_forward_hook(
            lambda module, x, out: logits.append(out.detach().numpy())
        )
    model(torch.tensor([row["token_ids"]]))
    sums = [np.log(np.exp(x.astype("float64")).sum(-1)) for x in logits]
    task = kpt.SFTTask.from_preset(directory, sequence_length=16)
    task.compile("sgd", router_loss=LOSS)
    record = Record()
    task.fit([row], batch_size=1, verbose=0, callbacks=[record])
    (logs,) = record.steps
    assert len(sums) == len(task.causal_lm.backbone.transformer_layers)
    np.testing.assert_allclose(
        logs["router_z_loss"], np.mean(np.square(sums)), rtol=1e-5
    )


def test_evaluation_leaves_it_out():
    causal_lm = make_mixture("Mixtral", num_layers=1)
    task = kpt.SFTTask(causal_lm, sequence_length=48)
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
    causal_lm = make_mixture("Mixtral", num_experts=8, num_layers=1)
    # A part that all tokens share, which the router reads.
    (layer,) = causal_lm.backbone.transformer_layers
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
    assert with_loss[0] == without[0] > 3.5
    assert with_loss[-1] < 2.0 < 3.0 < without[-1]


def made_to_resume():
    causal_lm = make_mixture("Mixtral", num_layers=1)
    task = kpt.SFTTask(causal_lm, sequence_length=48)
    task.compile(
        keras.optimizers.Adam(1e-3), router_loss=LOSS, micro_batch_size=2
    )
    return task


resumable = starts_again(made_to_resume)


def run(task, directory, epochs=2):
    callbacks = [
        kpt.callbacks.MetricsLog(directory),
        kpt.callbacks.Checkpoint(directory, every=1),
    ]
    fit = {"batch_size": 4, "verbose": 0, "callbacks": callbacks}
    task.fit(ROWS, epochs=epochs, **fit)
    return weights(task)


def test_a_run_resumes_bit_for_bit(tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    whole = run(resumable(), straight)
    run(resumable(), parts, epochs=1)
    resumed = run(resumable(), parts)
    for path, value in whole.items():
        np.testing.assert_array_equal(value, resumed[path], err_msg=path)
    names = ("step", "loss", *METRICS)
    logs = [
        [{name: line[name] for name in names} for line in read_log(folder)]
        for folder in (straight, parts)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    task = resumable()
    task.compile(keras.optimizers.Adam(1e-3), micro_batch_size=2)
    with pytest.raises(ValueError, match="router_loss differs"):
        run(task, parts)
