"""Prompts with images in the built-in engine, against transformers."""

import dataclasses
import functools

import jax
import keras
import keras_hub
import numpy as np
import pytest
import torch

import keras_posttrain as kpt
from keras_posttrain.models import window_key_values
from keras_posttrain.rollout import NativeRollout, Request
from tests import vision
from tests.rollout.test_drafts import draft_always

NEW = 6


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return vision.directory_of(request, tmp_path_factory)


def nothing(completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def task(directory):
    return shared_task(directory)


@functools.cache
def shared_task(directory):
    task = kpt.GRPOTask.from_preset(
        directory, vision=True, sequence_length=256, dtype="float32"
    )
    task.compile(rewards=[nothing], max_completion_length=8)
    return task


def engine_of(task, *args, **kwargs):
    engine = NativeRollout(*args, **kwargs)
    engine.set_model(task)
    return engine


@functools.cache
def plain(task, num_slots=128):
    """An engine for all tests that look at its samples alone."""
    return engine_of(task, num_slots)


def prompts_of(task, counts=(1, 2, 0, 1), seed=0, text=""):
    rows = vision.random_rows(counts, seed)
    for row in rows:
        row["messages"][0]["content"].append({"type": "text", "text": text})
    rows = [
        {"prompt": row["messages"][:1], "images": row.get("images")}
        for row in rows
    ]
    return task.prepare_prompts(rows)[0]


def request(prompt, **settings):
    settings = {"max_tokens": NEW, "seed": 3} | settings
    return Request(prompt.token_ids, images=prompt.images, **settings)


def check_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(
            ours.per_token_logps, theirs.per_token_logps, atol=2e-5
        )


def reference_step(model, prompt, new):
    """transformers' log-probabilities of the next token, by a full pass."""
    ids = torch.tensor([[*prompt.token_ids, *new]])
    more = {}
    if prompt.images is not None:
        kind = model.config.model_type
        more = vision.images_of(prompt.images, kind)
        more = {name: torch.tensor(x) for name, x in more.items()}
        more[vision.TYPES[kind]] = torch.zeros_like(ids)
        more[vision.TYPES[kind]][0, prompt.images.tokens] = 1
    with torch.no_grad():
        logits = model(ids, **more).logits[0, -1]
    return torch.log_softmax(logits, -1).numpy()


@pytest.mark.parametrize(
    "directory, num_slots",
    [
        pytest.param("gemma3", 1, marks=pytest.mark.full),
        ("gemma3", 4),
        ("gemma4", 4),
    ],
    indirect=["directory"],
)
def test_greedy_equals_full_passes_of_transformers(directory, task, num_slots):
    """Prompts of several lengths and numbers of images, one without."""
    prompts = prompts_of(task)
    model = vision.load(directory)
    requests = [request(p, temperature=0) for p in prompts]
    found = plain(task, num_slots).generate(requests)
    for prompt, [completion] in zip(prompts, found):
        new = []
        for token, logp in zip(
            completion.token_ids, completion.per_token_logps
        ):
            logps = reference_step(model, prompt, new)
            assert token == int(logps.argmax())
            np.testing.assert_allclose(logp, logps[token], atol=2e-5)
            new.append(token)


@vision.OF_ALL_KINDS
def test_a_window_that_ends_in_an_image(directory, task, monkeypatch):
    """A layer caches 12 tokens: some of an image, or of text behind it."""
    prompts = prompts_of(task, (1, 2)) + prompts_of(task, (1,), text=LONG)
    requests = [request(p, num_generations=2) for p in prompts]
    found = plain(task).generate(requests)
    monkeypatch.setattr(window_key_values, "COLUMNS", 1)
    engine = engine_of(task, prefill_chunk=64)
    for samples, others in zip(engine.generate(requests), found):
        check_same(samples, others)
    cache = jax.eval_shape(lambda: engine._decoder._zeros(2, 256))
    assert [layer.num_columns for layer in cache] == [12, 256]


def test_drafts_in_a_window_shorter_than_them(task, monkeypatch):
    """Equal tokens with other images have drafts of their own."""
    [first] = prompts_of(task, (1,))
    images = first.images
    images = dataclasses.replace(images, pixels=255 - images.pixels)
    requests = [
        request(p, num_generations=2, max_tokens=40, temperature=0.2)
        for p in (first, dataclasses.replace(first, images=images))
    ]
    want = plain(task).generate(requests)
    monkeypatch.setattr(window_key_values, "COLUMNS", 1)
    draft_always(monkeypatch)
    engine = engine_of(task, drafts=True)
    for _ in range(2):
        engine.metrics()
        for samples, others in zip(engine.generate(requests), want):
            check_same(samples, others)
    assert engine.metrics()["rollout/tokens_per_pass"] > 2
    known = engine._drafts._known.values()
    assert [len(of_prompt) for of_prompt in known] == [2, 2]


# Longer than `LEAST_SHARED`.
LONG = "what is left of the red house? " * 12


@pytest.mark.parametrize(
    "directory, num_slots, text",
    [("gemma3", 1, ""), ("gemma3", 4, LONG), ("gemma4", 4, LONG)],
    indirect=["directory"],
)
def test_equal_tokens_with_other_images_are_other_prompts(
    directory, task, num_slots, text
):
    """Nothing is shared between them, whether computed at once or in turn."""
    [first] = prompts_of(task, (2,), text=text)
    pixels = first.images.pixels.copy()
    # The first image is equal.
    pixels[1] = 255 - pixels[1]
    images = dataclasses.replace(first.images, pixels=pixels)
    other = dataclasses.replace(first, images=images)
    requests = [
        request(p, num_generations=2) for p in (first, other, first, other)
    ]
    found = plain(task, num_slots).generate(requests)
    for given, samples in zip(requests[:2], found):
        [alone] = plain(task).generate([given])
        check_same(samples, alone)
    logps = [[list(c.per_token_logps) for c in samples] for samples in found]
    assert logps[0] != logps[1]
    # Equal prompts are one prompt with more samples.
    given = dataclasses.replace(requests[0], num_generations=4)
    [four] = plain(task).generate([given])
    check_same([*found[0], *found[2]], four)


def test_prompts_share_what_follows_their_images(task):
    """The question after equal images is computed behind a copy of them."""
    [prompt] = prompts_of(task, (1,), text=LONG)
    longer = dataclasses.replace(
        prompt, token_ids=(*prompt.token_ids, 40, 41, 42)
    )
    requests = [request(prompt, temperature=0), request(longer, temperature=0)]
    engine = engine_of(task, 4)
    found = engine.generate(requests)
    assert any("extension" in text for text in engine.programs)
    for given, samples in zip(requests, found):
        check_same(samples, plain(task).generate([given])[0])


def test_an_image_is_not_computed_behind_other_tokens(task):
    """Prompts that begin alike and then have other images."""
    [prompt] = prompts_of(task, (1,))
    before = tuple([2, *range(40, 120)])
    images = dataclasses.replace(
        prompt.images, places=prompt.images.places + len(before)
    )
    prompts = [
        dataclasses.replace(
            prompt,
            token_ids=(*before, *prompt.token_ids),
            images=dataclasses.replace(
                images, pixels=images.pixels ^ np.uint8(flip)
            ),
        )
        for flip in (0, 255)
    ]
    requests = [request(p) for p in prompts]
    engine = engine_of(task, 4)
    found = engine.generate(requests)
    assert not any("extension" in text for text in engine.programs)
    for given, samples in zip(requests, found):
        check_same(samples, plain(task).generate([given])[0])


def test_what_follows_images_is_computed_in_pieces(task):
    """What comes before the last image is not divided."""
    requests = [
        request(p, num_generations=2)
        for p in prompts_of(task, (2, 1, 0), text=LONG)
    ]
    engine = engine_of(task, prefill_chunk=64)
    found = engine.generate(requests)
    assert any("by 64 tokens" in text for text in engine.programs)
    for samples, expected in zip(found, plain(task).generate(requests)):
        check_same(samples, expected)


@vision.OF_ALL_KINDS
def test_an_interrupted_sample_continues_with_its_images(directory, task):
    """Its first tokens are part of the prompt then."""
    [prompt] = prompts_of(task, (2,))
    engine, whole = plain(task), request(prompt, first_sample=0)
    [[completion]] = engine.generate([whole])
    begun = completion.token_ids[:2]
    rest = dataclasses.replace(
        whole,
        token_ids=(*prompt.token_ids, *begun),
        max_tokens=NEW - 2,
        drawn=2,
    )
    [[found]] = engine.generate([rest])
    assert [*begun, *found.token_ids] == completion.token_ids


def test_eight_devices_are_one(directory, task, eight_devices):
    prompts = prompts_of(task, (1, 2, 0, 1, 1))
    requests = [request(p, num_generations=2) for p in prompts]
    expected = plain(task).generate(requests)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(2)
    )
    split = kpt.SFTTask.from_preset(
        directory, vision=True, sequence_length=256, dtype="float32"
    )
    for samples, wanted in zip(engine_of(split).generate(requests), expected):
        check_same(samples, wanted)


# What is refused


def changed(prompt, **changes):
    return dataclasses.replace(
        prompt, images=dataclasses.replace(prompt.images, **changes)
    )


def test_bad_images(task):
    [one, two] = prompts_of(task, (1, 2))
    engine = plain(task)
    places, size = one.images.places, vision.SIZE
    bad = [
        (
            dataclasses.replace(one, images=None),
            "request 0 with tokens of 1 images, and 0 images",
        ),
        (
            dataclasses.replace(two, images=one.images),
            "request 0 with tokens of 2 images, and 1 images",
        ),
        (changed(one, places=places + 1), "at their `places`"),
        (changed(one, places=places + 1000), "at their `places`"),
        (
            changed(one, pixels=np.zeros((1, size, size // 2, 3), "uint8")),
            r"\(28, 28, 3\). Received: request 0 with images of shape",
        ),
        (
            dataclasses.replace(one, images=one.images.pixels),
            "of type ndarray",
        ),
        (
            dataclasses.replace(
                one, token_ids=one.token_ids[: places.max() + 1]
            ),
            "must have a token after its images",
        ),
    ]
    for prompt, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.generate([request(prompt)])


def test_what_takes_no_images(directory, task):
    [prompt] = prompts_of(task, (1,))
    with pytest.raises(ValueError, match="`score` reads no images"):
        plain(task).score([list(prompt.token_ids)])
    with plain(task).session() as session:
        with pytest.raises(ValueError, match="by the engine's `generate`"):
            session.submit(request(prompt))
    text = kpt.SFTTask.from_preset(directory, dtype="float32")
    with pytest.raises(ValueError, match="Gemma3CausalLM without a vision"):
        engine_of(text).generate([request(prompt)])
    # A family that KerasHub decodes in batches.
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=520, num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=8, max_sequence_length=256, dropout=0.0,
    )  # fmt: skip
    batched = kpt.SFTTask(keras_hub.models.GPT2CausalLM(backbone))
    with pytest.raises(ValueError, match="GPT2CausalLM without a vision"):
        engine_of(batched).generate([request(prompt, max_tokens=1)])
    vllm = kpt.rollout.VLLMRollout()
    vllm.set_model(task)
    vllm._max_length = lambda: 256
    with pytest.raises(ValueError, match="request 0 with images, for VLLMR"):
        vllm.generate([request(prompt)])
