"""Families without the attention hook, sampled by KerasHub's decoding."""

import jax
import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout.native.batch_decoder import BatchDecoder
from keras_posttrain.rollout.native.samples import Samples
from keras_posttrain.rollout.request import Request

M = keras_hub.models
COMMON = dict(
    vocabulary_size=97, num_layers=2, hidden_dim=16, intermediate_dim=24
)
GROUPED = dict(**COMMON, num_query_heads=2, num_key_value_heads=1)
EXPERTS = dict(**GROUPED, num_experts=3, top_k=2)
HEADS = dict(**COMMON, num_heads=2)
# The windows are shorter than the sequences.
FAMILIES = {
    "GPT2": dict(**HEADS, dropout=0.0, max_sequence_length=40),
    "Mixtral": dict(**EXPERTS, sliding_window=6),
    "Qwen3Moe": dict(**EXPERTS, head_dim=8, moe_intermediate_dim=12),
    "Gemma4": dict(
        **{**GROUPED, "num_layers": 4},
        image_size=16,
        head_dim=8,
        global_head_dim=16,
        sliding_window_size=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        final_logit_soft_cap=3.0,
    ),
    "GptOss": dict(**EXPERTS, sliding_window=6, head_dim=8),
    "QwenMoe": dict(
        **EXPERTS, moe_intermediate_dim=12, shared_expert_intermediate_dim=12
    ),
    "Bloom": HEADS,
    "Falcon": dict(
        **{**COMMON, "intermediate_dim": 64}, num_attention_heads=2
    ),
    "OPT": dict(**HEADS, dropout=0.0, max_sequence_length=40),
    "Phi3": GROUPED,
    "SmolLM3": dict(
        **COMMON,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention"] * 2,
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        max_position_embeddings=64,
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    ),
}
# Absolute positions, and rotations.
IN_CI = ["GPT2", "Phi3"]
LENGTH = 26
STOP = (7, 8, 9)


def decoder_of(task, num_slots, **settings):
    return BatchDecoder(
        task.causal_lm, task.using_weights, num_slots, **settings
    )


def weights_of(task):
    return (
        [v.value for v in task.trainable_variables],
        [v.value for v in task.non_trainable_variables],
    )


def generate(task, num_slots, asked, emit=None, **settings):
    decoder = decoder_of(task, num_slots, **settings)
    return decoder.generate(weights_of(task), asked, emit)


def make(family):
    keras.utils.set_random_seed(1)
    backbone = getattr(M, family + "Backbone")(**FAMILIES[family])
    causal_lm = getattr(M, family + "CausalLM")(
        backbone=backbone, preprocessor=None
    )
    # With the initial weights all tokens would be about equally probable.
    for v in causal_lm.variables:
        if len(v.shape) > 1:
            v.assign(3 * v.value)
    return kpt.SFTTask(causal_lm, sequence_length=LENGTH)


def requests(**more):
    rng = np.random.default_rng(0)
    return [
        Request(
            rng.integers(3, 97, length).tolist(),
            2,
            12,
            temperature,
            seed=5,
            stop_token_ids=STOP,
            **more,
        )
        for length, temperature in [
            (1, 1.0),
            (14, 0.7),
            (3, 0.0),
            (9, 1.0),
            (14, 1.3),
        ]
    ]


def plain_logits(task, sequences):
    """float64 logits of KerasHub's own call, without a cache."""
    causal_lm = task.causal_lm
    ids = np.zeros((len(sequences), LENGTH), "int32")
    for row, sequence in zip(ids, sequences):
        row[: len(sequence)] = sequence
    lengths = np.array([[len(s)] for s in sequences])
    places = np.broadcast_to(np.arange(LENGTH), ids.shape)
    inputs = {
        "token_ids": ids,
        "padding_mask": (places < lengths).astype("int32"),
        "position_ids": places.astype("int32"),
    }
    wanted = causal_lm.backbone.input
    inputs = {k: v for k, v in inputs.items() if k in wanted}
    return np.asarray(jax.jit(lambda x: causal_lm(x))(inputs), "float64")


def check_samples(task, asked, out):
    """Log-probabilities, greedy tokens, lengths and reasons."""
    flat = [(r, *s) for r, samples in zip(asked, out) for s in samples]
    assert [len(samples) for samples in out] == [2] * len(asked)
    sequences = [list(r.token_ids) + ids for r, ids, *_ in flat]
    for logits, (r, ids, logps, reason) in zip(
        plain_logits(task, sequences), flat
    ):
        first = len(r.token_ids)
        logits = logits[first - 1 : first - 1 + len(ids)]
        scale = r.temperature or 1.0
        want = np.asarray(jax.nn.log_softmax(logits / scale))
        np.testing.assert_allclose(
            logps,
            want[np.arange(len(ids)), ids],
            atol=2e-5 * max(1, 1 / scale),
        )
        assert logps.dtype == "float32" and len(logps) == len(ids)
        if r.temperature == 0:
            assert logits.argmax(-1).tolist() == ids
        assert not set(ids[:-1]) & set(STOP)
        assert reason == ("stop" if ids[-1] in STOP else "length")
        assert reason == "stop" or len(ids) == r.max_tokens
    return flat


@pytest.mark.parametrize(
    "family",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_samples_are_the_models(family):
    """Prompts of 1 to 14 tokens in one batch, of several temperatures."""
    task = make(family)
    asked = requests()
    out = generate(task, 16, asked)
    flat = check_samples(task, asked, out)
    rows = [
        {
            "token_ids": list(r.token_ids) + ids,
            "completion_mask": [0] * len(r.token_ids) + [1] * len(ids),
        }
        for r, ids, *_ in flat
    ]
    for (r, _, logps, _), trained in zip(flat, task.log_probs(rows, 10)):
        if r.temperature in (0, 1):
            trained = trained[len(r.token_ids) :]
            np.testing.assert_allclose(logps, trained, atol=2e-5)
    # Some end by a stop token, some by their length.
    assert {s[2] for samples in out for s in samples} == {"stop", "length"}


@pytest.fixture(scope="module")
def gpt2():
    return make("GPT2")


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_tokens_are_the_same_in_any_batch(gpt2, limits):
    asked = requests(**limits)
    want = generate(gpt2, 16, asked)
    order = [3, 0, 4, 2, 1]
    for slots in (1, 3):
        out = generate(gpt2, slots, [asked[i] for i in order])
        for i, samples in zip(order, out):
            for a, b in zip(samples, want[i]):
                assert a[0] == b[0] and a[2] == b[2]
                np.testing.assert_allclose(a[1], b[1], atol=2e-5)
    sampled = [s[0] for samples in want for s in samples]
    assert sampled[0] != sampled[1]
    assert sampled[4] == sampled[5]  # greedy


def test_truncation_and_weights_are_those_of_the_call(gpt2):
    decoder = decoder_of(gpt2, 8)
    [prompt] = [r.token_ids for r in requests()[3:4]]
    greedy = Request(prompt, max_tokens=10, temperature=0, seed=0)
    best = Request(prompt, 3, 10, temperature=2.0, top_k=1, seed=0)
    [[one]], many = (
        decoder.generate(weights_of(gpt2), [r]) for r in (greedy, best)
    )
    assert all(s[0] == one[0] for s in many[0])
    programs = list(decoder.programs)
    kernel = gpt2.policy.kernel
    old = np.array(kernel.value)
    try:
        kernel.assign(-old)
        [[other]] = decoder.generate(weights_of(gpt2), [greedy])
    finally:
        kernel.assign(old)
    assert other[0] != one[0]
    assert decoder.programs == programs
    [[again]] = decoder.generate(weights_of(gpt2), [greedy])
    assert again[0] == one[0]


def test_equal_requests_get_different_samples(gpt2):
    one = Request([5, 6, 11], max_tokens=10, seed=3)
    a, b = generate(gpt2, 4, [one, one])
    [both] = generate(gpt2, 4, [Request([5, 6, 11], 2, 10, seed=3)])
    assert [a[0][0], b[0][0]] == [s[0] for s in both]
    assert a[0][0] != b[0][0]


def test_tokens_are_streamed(gpt2):
    streamed, calls = {}, []

    def emit(request, generation, ids):
        calls.append((request, generation))
        streamed.setdefault((request, generation), []).extend(ids)

    asked = [
        Request([5, 6, 11], 2, 30, seed=3),
        Request([5], 1, 5, seed=3, stop_token_ids=range(50)),
    ]
    out = generate(gpt2, 4, asked, emit)
    for i, samples in enumerate(out):
        for g, s in enumerate(samples):
            assert streamed[i, g] == s[0]
    assert calls.count((0, 0)) == 2
    assert [s[0] for x in out for s in x] == [
        s[0] for x in generate(gpt2, 4, asked) for s in x
    ]


def test_lengths_far_apart_share_no_batch(gpt2):
    """Two prompts of 2 tokens, two of 30: 28 columns of waiting would cost
    more than the 4 columns that each batch has to sample."""
    rng = np.random.default_rng(0)
    asked = [
        Request(rng.integers(3, 97, n).tolist(), 1, 4, seed=0)
        for n in (2, 30, 2, 30)
    ]
    decoder = decoder_of(gpt2, 8)
    batches = [
        [s.request for s in batch]
        for batch in decoder._batches(Samples(asked))
    ]
    assert batches == [[0, 2], [1, 3]]
    assert [len(x[0][0]) for x in generate(gpt2, 8, asked)] == [4] * 4
    assert generate(gpt2, 8, []) == []


def test_the_budget_of_the_cache(gpt2):
    """Two layers of keys and values of 40 tokens, 16 numbers each, twice:
    2 * 2 * 2 * 40 * 16 * 4 = 20,480 bytes a row."""
    asked = [Request([5, 6, 11], 4, 8, seed=3)]
    small = decoder_of(gpt2, 16, cache_bytes=2 * 20_480 + 100)
    out = small.generate(weights_of(gpt2), asked)
    assert small.programs[0].startswith("batch prefill of 2 x")
    whole = generate(gpt2, 16, asked)
    assert [s[0] for s in out[0]] == [s[0] for s in whole[0]]
    with pytest.raises(ValueError, match="20 KiB, the budget is 9.766 KiB"):
        generate(gpt2, 16, asked, cache_bytes=10_000)


def test_positions_end(gpt2):
    with pytest.raises(ValueError, match="Request 1 .* of 40 tokens.*41 in"):
        generate(
            gpt2,
            4,
            [Request([5], max_tokens=39), Request([5], max_tokens=40)],
        )


def test_a_wrong_decode_is_refused():
    """GPT-NeoX's cached decode rotates each new query as if it were the
    first token."""
    backbone = M.GPTNeoXBackbone(**HEADS)
    causal_lm = M.GPTNeoXCausalLM(backbone=backbone, preprocessor=None)
    task = kpt.SFTTask(causal_lm, sequence_length=16)
    with pytest.raises(ValueError, match="GPTNeoX.* position 0"):
        decoder_of(task, 4)


def test_a_window_that_cannot_be_decoded_is_refused():
    backbone = M.QwenMoeBackbone(
        **FAMILIES["QwenMoe"],
        use_sliding_window_attention=True,
        sliding_window_size=6,
    )
    causal_lm = M.QwenMoeCausalLM(backbone=backbone, preprocessor=None)
    task = kpt.SFTTask(causal_lm, sequence_length=16)
    with pytest.raises(ValueError, match="Qwen-MoE with a sliding window"):
        decoder_of(task, 4)


def test_the_two_decoders_sample_the_same():
    """On a family that both can serve."""
    keras.utils.set_random_seed(1)
    backbone = M.Llama3Backbone(**GROUPED)
    causal_lm = M.Llama3CausalLM(backbone=backbone, preprocessor=None)
    task = kpt.SFTTask(causal_lm, sequence_length=LENGTH)
    engine = kpt.rollout.NativeRollout(num_slots=4)
    engine.set_model(task)
    asked = requests()
    for ours, theirs in zip(generate(task, 3, asked), engine.generate(asked)):
        for a, b in zip(ours, theirs):
            assert a[0] == b.token_ids and a[2] == b.finish_reason
            np.testing.assert_allclose(a[1], b.per_token_logps, atol=3e-5)


def test_eight_devices_sample_the_same(eight_devices):
    one = generate(make("GPT2"), 16, requests())
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=eight_devices)
    )
    eight = generate(make("GPT2"), 16, requests())
    for a, b in zip(one, eight, strict=True):
        assert [s[0] for s in a] == [s[0] for s in b]
