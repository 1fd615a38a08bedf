"""Captured activations, and a policy compared with its teachers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.losses.divergence import forward_kl_loss
from keras_posttrain.models.activation_capture import ActivationCapture
from keras_posttrain.models.divergence_head import TopTeacher
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from tests.support import REFERENCE

LENGTH = 12


@pytest.fixture(scope="module")
def models():
    """A `CausalLM` of the reference folder, loaded once."""
    return functools.cache(
        lambda name: loading.load_causal_lm(REFERENCE / "models" / name)
    )


def batch_of(*rows, length=LENGTH, seed=1):
    """Each row is given by the lengths of its sequences."""
    rng = np.random.default_rng(seed)
    batch = {
        name: np.zeros((len(rows), length), "int32")
        for name in ("token_ids", "segment_ids", "positions")
    }
    for r, lengths in enumerate(rows):
        start = 0
        for i, n in enumerate(lengths):
            place = slice(start, start + n)
            batch["token_ids"][r, place] = rng.integers(3, 90, n)
            batch["segment_ids"][r, place] = i + 1
            batch["positions"][r, place] = np.arange(n)
            start += n
    return batch


def tapped(policy, batch, layers=(0, 1)):
    """Final hidden states, and what was found in the layers."""

    @jax.jit
    def run(batch):
        capture = ActivationCapture(
            hidden_layers=layers, attention_layers=layers
        )
        final = policy.hidden_states(batch, capture=capture)
        return final, capture.hidden, capture.attentions

    return run(batch)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_captures_are_those_of_transformers(models, name):
    """Gemma 2 caps its scores and every second layer has a window; Qwen 3
    norms queries and keys, and heads share keys."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    batch = batch_of([LENGTH], [LENGTH])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        REFERENCE / "models" / name,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    with torch.no_grad():
        want = theirs(
            torch.tensor(batch["token_ids"], dtype=torch.long),
            output_hidden_states=True,
            output_attentions=True,
        )
    _, hidden, attentions = tapped(Policy(models(name)), batch)
    for layer in (0, 1):
        np.testing.assert_allclose(
            attentions[layer], want.attentions[layer], atol=2e-5
        )
    # Theirs of the last layer has the last norm in it.
    size = want.hidden_states[1].std().item()
    np.testing.assert_allclose(
        hidden[0], want.hidden_states[1], atol=2e-5 * max(size, 1)
    )


def test_the_last_layers_output_is_before_the_norm(models):
    policy = Policy(models("qwen3"))
    final, hidden, _ = tapped(policy, batch_of([LENGTH]))
    norm = policy.backbone.layer_norm
    np.testing.assert_allclose(norm(hidden[1]), final, rtol=1e-5, atol=1e-5)


def test_attention_stays_within_its_sequence(models):
    """Two sequences of a row have the attention weights of each alone: 0
    ahead, to another sequence and to padding. A capture changes no output."""
    policy = Policy(models("gemma2"))
    batch = batch_of([5, 4])
    alone = batch_of([5], [4])
    alone["token_ids"][1, :4] = batch["token_ids"][0, 5:9]
    final, hidden, attentions = tapped(policy, batch)
    np.testing.assert_array_equal(final, jax.jit(policy.hidden_states)(batch))
    _, single_hidden, single = tapped(policy, alone)
    for layer in (0, 1):
        weights = np.asarray(attentions[layer])[0]
        heads = weights.shape[0]
        assert weights.dtype == "float32"
        np.testing.assert_allclose(
            weights.sum(-1), np.tile(np.arange(LENGTH) < 9, (heads, 1)), 1e-5
        )
        for start, stop, row in ((0, 5, 0), (5, 9, 1)):
            n = stop - start
            part = weights[:, start:stop]
            inside = part[:, :, start:stop]
            assert part.sum() == pytest.approx(inside.sum(), rel=1e-6)
            assert (np.triu(inside, 1) == 0).all()
            np.testing.assert_allclose(
                inside, single[layer][row, :, :n, :n], atol=1e-5
            )
            np.testing.assert_allclose(
                hidden[layer][0, start:stop],
                single_hidden[layer][row, :n],
                rtol=1e-4,
                atol=1e-4,
            )


def test_hidden_states_and_their_gradients_survive_rematerialisation(models):
    causal_lm = models("qwen3")
    batch = batch_of([LENGTH])
    variables = causal_lm.backbone.transformer_layers[0].trainable_variables

    def gradients(policy):
        import keras

        def loss(values):
            capture = ActivationCapture(hidden_layers=(1,))
            with keras.StatelessScope(list(zip(variables, values))):
                policy.hidden_states(batch, capture=capture)
            return jnp.sum(capture.hidden[1] ** 2)

        return jax.jit(jax.grad(loss))([v.value for v in variables])

    want = gradients(Policy(causal_lm))
    assert all(np.abs(g).max() > 0 for g in want)
    for a, b in zip(gradients(Policy(causal_lm, remat="full")), want):
        # Their sums round by the size of the largest terms.
        atol = 2e-6 * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "capture, remat, message",
    [
        (
            ActivationCapture(hidden_layers=(2,)),
            "none",
            r"from 0 to 1.*hidden_layers=\(2,",
        ),
        (
            ActivationCapture(attention_layers=(-1,)),
            "none",
            "attention_layers=.-1",
        ),
        (ActivationCapture(attention_layers=(0,)), "full", "remat='none'"),
    ],
)
def test_what_cannot_be_captured_says_so(models, capture, remat, message):
    policy = Policy(models("qwen3"), remat=remat)
    with pytest.raises(ValueError, match=message):
        policy.hidden_states(batch_of([LENGTH]), capture=capture)


def test_a_family_without_the_hook_says_so(models):
    policy = Policy(models("qwen3"))
    policy.packable = False
    with pytest.raises(ValueError, match="KerasHub's own call"):
        policy.hidden_states(
            batch_of([LENGTH]), capture=ActivationCapture(hidden_layers=(0,))
        )


# A policy and its teachers


def log_softmax(policy, hidden, temperature=1.0):
    kernel = policy.kernel.value
    logits = hidden @ (kernel.T if policy.head().transposed else kernel)
    cap = policy.head().soft_cap
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    return jax.nn.log_softmax(logits / temperature)


def test_a_policy_with_its_teachers(models):
    """A packed batch with a shared prompt; one teacher reads the same batch,
    another a longer one of its own, a third is a top 5 (its tail included).
    The sum is that of full distributions, token by token."""
    student, other = Policy(models("gemma2")), Policy(models("gemma2_ref"))
    batch = batch_of([3, 4, 4])
    batch["prefix_segments"] = np.array([[0, 1, 1]], "int32")
    batch["positions"][0, 3:11] = [3, 4, 5, 6] * 2
    predicted_by = np.arange(-1, LENGTH - 1, dtype="int32")
    predicted_by[7] = 2
    batch["predicted_by"] = predicted_by[None].clip(0)
    longer = batch_of([16], length=18, seed=3)
    source = np.arange(LENGTH, dtype="int32")[None] + 4
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2, 1, LENGTH)).astype("float32")
    weights[:, 0, :5] = 0
    shares = rng.random((3, 1, LENGTH)).astype("float32")
    top = jax.nn.log_softmax(rng.normal(size=(LENGTH, 90)).astype("float32"))
    top = TopTeacher(*jax.lax.top_k(top, 5)[::-1])
    needs = ("divergences", "per_token_logps", "agrees")

    @jax.jit
    def run(batch, longer):
        teachers = (other.teacher(batch), student.teacher(longer, source), top)
        return student.divergence_sum(
            batch, tuple(weights), teachers, shares, forward_kl_loss,
            temperature=2.0, tail=False, needs=needs,
        )  # fmt: skip

    total, outputs = run(batch, longer)
    forward = [
        jax.jit(policy.hidden_states)(b)[0]
        for policy, b in ((student, batch), (other, batch), (student, longer))
    ]
    places = batch["predicted_by"][0]
    ours = log_softmax(student, forward[0][places], 2.0)
    theirs = (
        log_softmax(other, forward[1][places], 2.0),
        log_softmax(student, forward[2][source[0]], 2.0),
    )
    parts = [forward_kl_loss(ours, t) for t in theirs]
    parts.append(
        forward_kl_loss(jnp.take_along_axis(ours, top.ids, axis=1), top.logps)
    )
    used = (np.arange(LENGTH) >= 5) & (batch["segment_ids"][0] > 0)
    divergences = np.where(used, sum(shares[:, 0] * np.stack(parts)), 0)
    logps = log_softmax(student, forward[0][places])
    logps = np.take_along_axis(
        np.asarray(logps), batch["token_ids"][0][:, None], axis=1
    )[:, 0]
    logps = np.where(used, logps, 0)
    np.testing.assert_allclose(
        outputs["divergences"][0], divergences, rtol=2e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        outputs["per_token_logps"][0], logps, rtol=2e-4, atol=1e-5
    )
    want = (weights[0, 0] * divergences + weights[1, 0] * logps).sum()
    np.testing.assert_allclose(total, want, rtol=2e-4, atol=1e-4)
    assert outputs["agrees"].shape == (1, LENGTH)


def test_a_mask_adds_values_without_weight(models):
    """Tokens without a weight are projected where a metric wants them."""
    policy = Policy(models("qwen3"))
    batch = batch_of([LENGTH])
    weights = np.zeros((1, LENGTH), "float32")
    weights[0, 4] = 1.0
    mask = np.arange(LENGTH)[None] >= 3

    @jax.jit
    def run(batch):
        hidden = policy.hidden_states(batch)
        teacher = policy.teacher(batch, hidden=hidden)
        total, found = policy.divergence_sum(
            batch, (weights, None), [teacher], None, forward_kl_loss,
            hidden=hidden, needs=("agrees", "per_token_logps"), mask=mask,
        )  # fmt: skip
        plain = policy.token_outputs(batch, mask, hidden=hidden)
        return total, found, plain["per_token_logps"]

    total, found, logps = run(batch)
    assert abs(total) < 1e-6
    np.testing.assert_array_equal(found["agrees"], mask)
    np.testing.assert_allclose(found["per_token_logps"], logps, rtol=1e-6)
