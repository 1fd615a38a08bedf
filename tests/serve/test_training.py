"""What the server trains, by the real client."""

import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from safetensors.numpy import load_file
from tinker import types

import keras_posttrain as kpt
from tests.serve import support


def test_steps_are_those_of_the_loop(client, folder, tmp_path):
    model = support.new_model(client, seed=3)
    # Few rows and a large epsilon, so that gradients round little and Adam
    # does not divide the rounding of one by its size.
    adam = types.AdamParams(learning_rate=1e-2, eps=0.1, weight_decay=0.01)
    parts = support.supervised(slice(2)), support.supervised(slice(2, 5))
    for _ in range(3):
        done = [model.forward_backward(x, "cross_entropy") for x in parts]
        updated = model.optim_step(adam)
        losses = [x.result(120).metrics["loss:sum"] for x in done]
        norm = updated.result(120).metrics["grad_norm"]
    found = support.weights_of(model, folder, "loop")

    def sum_of_losses(batch, outputs):
        mask = batch["completion_mask"]
        return -jnp.sum(mask * outputs["per_token_logps"]), {}

    task = kpt.SFTTask.from_preset(
        support.preset(),
        lora=kpt.LoRA(rank=support.RANK, alpha=32, seed=3),
        sequence_length=support.LENGTH,
    )
    # Keras adds its epsilon elsewhere; Optax where torch does.
    optimizer = optax.adamw(1e-2, b2=0.95, eps=0.1, weight_decay=0.01)
    task.compile(optimizer, max_grad_norm=None)
    loss = kpt.losses.FunctionLoss(sum_of_losses, is_sum=True)
    data = [kpt.Datum(p, c) for p, c in support.encoded()[:5]]
    with kpt.Loop(task) as loop:
        for _ in range(3):
            loop.forward_backward(data, loss)
            logs = loop.optim_step()
    task.save_adapter(tmp_path)
    wanted = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert float(logs["loss"]) == pytest.approx(sum(losses), rel=1e-5)
    assert float(logs["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    for name in found:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6)


def policy_data(low=-0.6, high=0.6):
    """Returns data whose ratios are on both sides of the clips."""
    rng = np.random.default_rng(0)
    data = []
    for prompt, completion in support.encoded()[:4]:
        ids = prompt + completion
        size = len(ids) - 1
        data.append(
            support.datum(
                ids,
                logprobs=(-6.2 + rng.uniform(low, high, size)).tolist(),
                advantages=rng.normal(size=size).tolist(),
            )
        )
    return data


def by_hand(name, logps, old, advantages):
    ratios = torch.exp(logps - old)
    if name == "importance_sampling":
        return -ratios * advantages
    if name == "ppo":
        clipped = torch.clip(ratios, 0.9, 1.1)
        return -torch.minimum(ratios * advantages, clipped * advantages)
    if name == "cispo":
        return -torch.clip(ratios.detach(), 0.5, 1.5) * logps * advantages
    return -(logps * advantages - 0.1 * (logps - old) ** 2)


@pytest.mark.parametrize(
    "name, config",
    [
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
        ("dro", {"beta": 0.2}),
    ],
)
def test_a_named_loss_is_that_by_hand(client, folder, name, config):
    """Its value and its gradients, which torch derives on the client."""

    def loss(data, logps):
        terms = [
            by_hand(
                name,
                found,
                torch.tensor(x.loss_fn_inputs["logprobs"].to_numpy()),
                torch.tensor(x.loss_fn_inputs["advantages"].to_numpy()),
            ).sum()
            for x, found in zip(data, logps)
        ]
        return torch.stack(terms).sum(), {}

    data, weights, losses = policy_data(), [], []
    for kind in ("named", "custom"):
        model = support.new_model(client, seed=4)
        support.step(model, support.supervised(slice(3)))
        if kind == "named":
            done = model.forward_backward(data, name, config)
        else:
            done = model.forward_backward_custom(data, loss)
        model.optim_step(support.ADAM).result(120)
        losses.append(done.result(120).metrics["loss:sum"])
        found = support.weights_of(model, folder, f"{name}-{kind}")
        weights.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for key in weights[0]:
        np.testing.assert_allclose(*(w[key] for w in weights), atol=2e-6)


def test_targets_may_be_any_tokens(client):
    """Several for each token: those of a teacher, to distil from."""
    model = support.new_model(client)
    ids = support.encoded()[0][0]
    targets = np.arange(3 * len(ids)).reshape(len(ids), 3) + 7
    shape = list(targets.shape)

    def forward(**inputs):
        data = types.Datum(
            model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs
        )
        return model.forward([data], "cross_entropy").result(120)

    weights = np.full(shape, 0.5, "float32")
    several = forward(
        target_tokens=types.TensorData.from_numpy(targets),
        weights=types.TensorData.from_numpy(weights),
    )
    [found] = support.logprobs(several)
    assert found.shape == targets.shape
    for k in range(3):
        one = forward(target_tokens=targets[:, k].tolist())
        np.testing.assert_allclose(
            found[:, k], support.logprobs(one)[0], rtol=1e-6
        )
    assert several.metrics["loss:sum"] == pytest.approx(
        -0.5 * found.sum(), rel=1e-5
    )


def test_two_clients_do_not_disturb_each_other(server, folder):
    first, second = support.supervised(slice(6)), policy_data()

    def alone(seed, data, loss, name):
        with support.client_of(server) as client:
            model = support.new_model(client, seed=seed)
            for _ in range(3):
                support.step(model, data, loss)
            return support.weights_of(model, folder, name)

    wanted = (
        alone(1, first, "cross_entropy", "alone"),
        alone(2, second, "importance_sampling", "alone"),
    )
    with support.client_of(server) as one, support.client_of(server) as two:
        models = [support.new_model(one, 1), support.new_model(two, 2)]
        for _ in range(3):
            waiting = [
                models[0].forward_backward(first, "cross_entropy"),
                models[1].forward_backward(second, "importance_sampling"),
            ]
            waiting += [m.optim_step(support.ADAM) for m in models]
            for future in waiting:
                future.result(120)
        for model, arrays in zip(models, wanted):
            support.equal(
                support.weights_of(model, folder, "together"), arrays
            )


def test_a_smaller_rank_and_some_layers(client, folder):
    model = support.new_model(client, rank=2, train_mlp=False)
    support.step(model, support.supervised())
    support.step(model, support.supervised())
    for name, array in support.weights_of(model, folder, "part").items():
        ranks = array if "lora_A" in name else array.T
        assert not ranks[2:].any(), name
        assert ranks[:2].any() == ("self_attn" in name), name


def test_gradients_are_clipped_and_decay_is_decoupled(client, folder):
    model = support.new_model(client)
    before = support.weights_of(model, folder, "before")
    model.forward_backward(support.supervised(), "cross_entropy")
    params = types.AdamParams(
        learning_rate=0.1, weight_decay=0.5, eps=1.0, grad_clip_norm=1e-6
    )
    metrics = model.optim_step(params).result(120).metrics
    assert metrics["grad_norm"] > 1 and metrics["skipped"] == 0
    # Gradients of norm 1e-6 next to eps=1 move nothing: the decay is left.
    after = support.weights_of(model, folder, "after")
    for name in before:
        np.testing.assert_allclose(after[name], 0.95 * before[name], atol=2e-7)
