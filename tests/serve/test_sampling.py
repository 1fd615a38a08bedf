"""Samples of the server, by the real client."""

import itertools

import numpy as np
import pytest
import tinker
from tinker import types

from tests.serve import support


@pytest.fixture(scope="module")
def model(client):
    model = support.new_model(client)
    for _ in range(3):
        support.step(model, support.supervised())
    return model


@pytest.fixture(scope="module")
def sampler(model):
    return model.save_weights_and_get_sampling_client().result(60)


PROMPT = support.encoded()[5][0]


def sample(sampler, count=1, prompt=PROMPT, **settings):
    more = {
        name: settings.pop(name)
        for name in list(settings)
        if name.startswith(("include", "topk"))
    }
    settings = {"max_tokens": 6, "seed": 0, "stop": [], **settings}
    return sampler.sample(
        types.ModelInput.from_ints(prompt),
        count,
        types.SamplingParams(**settings),
        **more,
    )


def test_log_probs_are_those_of_forward(model, sampler):
    found = sample(sampler, 3, include_prompt_logprobs=True).result(120)
    assert len({tuple(x.tokens) for x in found.sequences}) > 1
    for sequence in found.sequences:
        data = [support.datum(PROMPT + list(sequence.tokens))]
        output = model.forward(data, "cross_entropy").result(120)
        [logps] = support.logprobs(output)
        whole = [*found.prompt_logprobs[1:], *sequence.logprobs]
        np.testing.assert_allclose(whole, logps, atol=1e-5)
    assert found.prompt_logprobs[0] is None
    alone = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT))
    assert alone.result(120) == found.prompt_logprobs


def logps(future):
    return np.array([x.logprobs for x in future.result(120).sequences])


def test_a_snapshot_keeps_its_weights(client, model, sampler):
    before = logps(sample(sampler, 4))
    support.step(model, support.supervised())
    newer = model.save_weights_and_get_sampling_client().result(60)
    base = client.create_sampling_client(base_model=support.preset())
    asked = [sample(x, 4) for x in (sampler, newer, base.result(60))]
    found = [logps(future) for future in asked]
    np.testing.assert_allclose(found[0], before, atol=1e-5)
    for first, second in itertools.combinations(found, 2):
        assert np.abs(first - second).max() > 1e-2


def test_many_requests_give_what_each_gives_alone(sampler):
    def tokens(future):
        return [list(x.tokens) for x in future.result(120).sequences]

    prompts = [prompt for prompt, _ in support.encoded()]
    asked = [
        sample(sampler, 2, prompt, seed=i) for i, prompt in enumerate(prompts)
    ]
    together = [tokens(future) for future in asked]
    for i in (0, 7):
        alone = tokens(sample(sampler, 2, prompts[i], seed=i))
        assert together[i] == alone


def test_stops(sampler):
    tokenizer = support.served_task().tokenizer
    free = sample(sampler, max_tokens=12).result(120).sequences[0]
    assert len(free.tokens) == 12 and free.stop_reason == "length"
    by_id = sample(sampler, max_tokens=12, stop=[free.tokens[4]])
    by_id = by_id.result(120).sequences[0]
    end = free.tokens.index(free.tokens[4]) + 1
    assert by_id.tokens == free.tokens[:end] and by_id.stop_reason == "stop"
    text = tokenizer.decode(free.tokens[3:5], skip_special_tokens=False)
    by_text = sample(sampler, max_tokens=12, stop=[text])
    by_text = by_text.result(120).sequences[0]
    size = len(by_text.tokens)
    assert by_text.tokens == free.tokens[:size] and size <= 5
    assert text in tokenizer.decode(by_text.tokens, skip_special_tokens=False)
    assert len(by_text.logprobs) == size and by_text.stop_reason == "stop"


def test_top_tokens(sampler):
    found = sample(
        sampler,
        temperature=0.0,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result(120)
    [sequence] = found.sequences
    assert found.topk_prompt_logprobs[0] is None
    for tops in found.topk_prompt_logprobs[1:]:
        assert len(tops) == 3 and tops == sorted(tops, key=lambda x: -x[1])
    best = [tops[0] for tops in sequence.topk_logprobs]
    assert [i for i, _ in best] == list(sequence.tokens)
    np.testing.assert_allclose(
        [x for _, x in best], sequence.logprobs, atol=1e-5
    )


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"max_tokens": 40}, "up to 32 tokens together"),
        ({"prompt": [1] * 33, "max_tokens": 1}, "up to 32 tokens together"),
        ({"prompt": [10**6]}, "the model's vocabulary. Received: 1000000"),
        ({"temperature": -1.0}, "`temperature` must be 0"),
        ({"topk_prompt_logprobs": 1000}, "`topk_prompt_logprobs` must be"),
    ],
)
def test_a_wrong_request_is_answered(sampler, settings, text):
    with pytest.raises(tinker.TinkerError, match=text):
        sample(sampler, **settings).result(120)
    assert sample(sampler).result(120).sequences


def test_an_engine_that_fails_is_an_answer(server, sampler, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(server._sampler.engine, "score", fail)
        asked = sample(sampler, include_prompt_logprobs=True)
        with pytest.raises(tinker.TinkerError, match="out of memory"):
            asked.result(120)
    found = sample(sampler, include_prompt_logprobs=True).result(120)
    assert len(found.prompt_logprobs) == len(PROMPT)
