"""Gemma 3 with its vision tower, against transformers."""

import json

import jax
import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

import keras_posttrain as kpt
from keras_posttrain.models import attention
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.vision import ImageBlocks
from tests import vision

BOUND = 2e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision.make_directory(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def task(directory):
    return make_task(directory)


def make_task(directory, **settings):
    settings = {"sequence_length": 256, "dtype": "float32"} | settings
    return kpt.SFTTask.from_preset(directory, vision=True, **settings)


def reference(model, rows):
    """transformers' log-probabilities of each row's tokens but the first."""
    found = []
    for row in rows:
        given = vision.inputs(row)
        with torch.no_grad():
            logps = torch.log_softmax(model(**given).logits[0, :-1], -1)
        ids = given["input_ids"][0, 1:, None]
        found.append(logps.gather(1, ids)[:, 0].numpy())
    return found


def check(task, rows, expected):
    for ours, theirs in zip(task.log_probs(rows), expected, strict=True):
        np.testing.assert_allclose(ours[1:], theirs, rtol=0, atol=BOUND)


def test_rows_are_those_of_the_processor(task):
    """Tokens and pixels are equal, and no token of an image carries loss."""
    rows = vision.random_rows()
    examples, report = task.prepare(rows)
    assert (report.kept, len(rows)) == (4, 4)
    for row, example in zip(rows, examples):
        theirs = vision.inputs(row)
        ids = theirs["input_ids"][0].numpy()
        np.testing.assert_array_equal(example.token_ids, ids)
        if "images" not in row:
            assert example.images is None
            continue
        of_images = theirs["token_type_ids"][0].numpy() == 1
        places = example.images.places.reshape(-1)
        np.testing.assert_array_equal(np.flatnonzero(of_images), places)
        assert example.completion_mask.any()
        assert not example.completion_mask[places].any()
        pixels = (example.images.pixels.transpose(0, 3, 1, 2) / 255 - 0.5) * 2
        found = theirs["pixel_values"].numpy()
        np.testing.assert_allclose(pixels, found, atol=1e-6)


def test_images_of_other_kinds(task):
    """Pillow's images, one alone, and messages without parts."""
    [row] = vision.random_rows((1,))
    [array] = row["images"]
    text = row["messages"][0]["content"]
    text = "".join(part.get("text", "") for part in text)
    messages = [{"role": "user", "content": text}, row["messages"][1]]
    given = [
        {"messages": messages, "images": [array]},
        {"messages": messages, "image": Image.fromarray(array)},
        {"messages": messages, "images": array[None]},
    ]
    examples, _ = task.prepare(given)
    for example in examples:
        np.testing.assert_array_equal(example.token_ids, examples[0].token_ids)
        np.testing.assert_array_equal(
            example.images.pixels, examples[0].images.pixels
        )
    assert examples[0].images.places[0, 0] < len(examples[0].token_ids) // 2


def test_log_probs_are_transformers(directory, task):
    rows = vision.random_rows((1, 2, 1, 0, 3))
    expected = reference(vision.load(directory), rows)
    check(task, rows, expected)
    # The images matter, each in its place.
    swapped = [{**rows[1], "images": rows[1]["images"][::-1]}]
    [other] = task.log_probs(swapped)
    assert np.abs(other[1:] - expected[1]).max() > 0.01


def test_packed_rows_are_rows_alone(directory, task):
    rows = vision.random_rows((1, 2, 0, 3), seed=3)
    expected = reference(vision.load(directory), rows)
    examples, _ = task.prepare(rows)
    batches = task.make_batches(
        examples, 1, packing=True, sequence_length=400, shuffle=False
    )
    batch = next(iter(batches.get_jax_iterator()))
    assert batch["segment_ids"].max() == len(rows)
    assert batch["pixels"].shape == (1, 8, vision.SIZE, vision.SIZE, 3)
    mask = jnp.ones(batch["token_ids"].shape, bool)
    found = jax.jit(task.policy.token_outputs)(batch, mask)
    found = found["per_token_logps"][0]
    for segment, row in enumerate(batch["sequence_ids"][0, : len(rows)], 1):
        ours = found[batch["segment_ids"][0] == segment][1:]
        np.testing.assert_allclose(ours, expected[row], rtol=0, atol=BOUND)


@pytest.mark.parametrize("window", [None, 40])
def test_an_image_across_blocks_of_queries(window):
    """Rows of several blocks have the weights of the complete matrix."""
    rng = np.random.default_rng(0)
    length, heads, size = 2 * attention.BLOCK + 60, 2, 16
    q, k, v = rng.normal(size=(3, 2, length, heads, 8)).astype("float32")
    segments = np.repeat([[1, 2, 0]], [250, length - 270, 20], axis=1)
    segments = np.repeat(segments, 2, axis=0).astype("int32")
    positions = np.where(segments == 2, np.arange(length) - 250, 0)
    positions = np.where(segments == 1, np.arange(length), positions)
    ids = np.zeros((2, length), "int32")
    # Right before, across and right after the ends of blocks.
    for image, start in enumerate((30, 234, 250, 504, 540), 1):
        ids[:, start : start + size] = image
    images = ImageBlocks(jnp.array(ids), size)
    settings = {"scale": 0.3, "sliding_window": window, "soft_cap": None}
    settings["images"] = images
    out = attention.segment_attention(q, k, v, segments, positions, **settings)
    weights = attention.attention_weights(
        q, k, segments, positions, **settings
    )
    expected = jnp.einsum("rhqk,rkhd->rqhd", weights, v)
    used = segments[0] > 0
    np.testing.assert_allclose(
        out[:, used], expected[:, used], rtol=0, atol=2e-6
    )
    # Token 234 sees the end of its image, 249, and nothing behind it.
    seen = np.flatnonzero(weights[0, 0, 234])
    assert seen.max() == 249 and np.flatnonzero(weights[0, 0, 233])[-1] == 233


def test_export_has_the_tower(directory, task, tmp_path):
    """transformers and this library read what is exported."""
    rows = vision.random_rows((2, 0))
    expected = reference(vision.load(directory), rows)
    task.export(tmp_path / "out")
    for found in reference(vision.load(tmp_path / "out"), rows), expected:
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    check(make_task(tmp_path / "out"), rows, expected)
    # Without `vision` it is the text model that it was.
    text = kpt.SFTTask.from_preset(tmp_path / "out", dtype="float32")
    assert "vision tower left out" in text.causal_lm.kpt_repairs[0]


def test_published_names(directory, task, tmp_path):
    """Published files name the tower `vision_model` and have a processor."""
    task.export(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    names = safetensors.numpy.load_file(file).keys()
    start = "vision_tower.vision_model.encoder.layers.0."
    assert any(name.startswith(start) for name in names)
    assert "language_model.model.norm.weight" in names
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    given = json.loads((directory / "config.json").read_text())
    assert found["architectures"] == given["architectures"]
    for name in ("image_token_index", "mm_tokens_per_image"):
        assert found[name] == given[name]
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_a_keras_hub_preset(directory, task, tmp_path):
    rows = vision.random_rows((2, 0))
    expected = reference(vision.load(directory), rows)
    task.save_to_preset(tmp_path / "preset")
    check(make_task(tmp_path / "preset"), rows, expected)


@pytest.mark.full
def test_keras_hubs_own_call(task):
    """One row by KerasHub's call of the backbone."""
    examples, _ = task.prepare(vision.random_rows((2,)))
    [example] = examples
    backbone = task.causal_lm.backbone
    ids, places = example.token_ids[None], example.images.places.reshape(-1)
    mask = np.zeros_like(ids)
    mask[0, places] = 1
    hidden = backbone(
        {
            "token_ids": ids,
            "padding_mask": np.ones_like(ids),
            "images": (example.images.pixels[None] / 255 - 0.5) * 2,
            "vision_indices": places[None],
            "vision_mask": mask,
        }
    )
    batches = task.make_batches(examples, 1, shuffle=False)
    batch = next(iter(batches.get_jax_iterator()))
    ours = Policy(task.causal_lm).hidden_states(batch)[:, : ids.shape[1]]
    np.testing.assert_allclose(ours, hidden, rtol=0, atol=1e-4)


def test_a_model_that_keras_hub_made(tmp_path):
    """It has no config of Hugging Face's; its export and preset have one."""
    tower = keras_hub.models.Gemma3VisionEncoder(
        image_size=vision.SIZE, patch_size=7, num_heads=2, hidden_dim=24,
        num_layers=1, intermediate_dim=40, output_dim=32, pool_size=2,
    )  # fmt: skip
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=520, image_size=vision.SIZE, num_layers=2,
        num_query_heads=4, num_key_value_heads=2, hidden_dim=32,
        intermediate_dim=48, head_dim=16, use_post_ffw_norm=True,
        use_post_attention_norm=True, use_sliding_window_attention=True,
        sliding_window_size=12, vision_encoder=tower,
    )  # fmt: skip
    causal_lm = keras_hub.models.Gemma3CausalLM(None, backbone)
    causal_lm.save_to_preset(tmp_path / "hub")
    tokenizer = vision.make_processor().tokenizer
    template = vision.read_template("gemma3")
    task = make_task(
        tmp_path / "hub", tokenizer=tokenizer, chat_template=template
    )
    task.export(tmp_path / "out")
    rows = vision.random_rows((2, 0))
    expected = reference(vision.load(tmp_path / "out"), rows)
    check(task, rows, expected)
    check(make_task(tmp_path / "out"), rows, expected)


@pytest.mark.parametrize(
    "file, change, message",
    [
        (
            "config.json",
            {"mm_tokens_per_image": 9},
            "square of a divisor of 4",
        ),
        (
            "config.json",
            {"vision_config": {**vision.VISION, "hidden_act": "relu"}},
            "vision_config.hidden_act",
        ),
        (
            "preprocessor_config.json",
            {"do_pan_and_scan": True},
            "do_pan_and_scan",
        ),
        (
            "processor_config.json",
            {"image_processor": {"image_mean": [0.4, 0.5, 0.5]}},
            "image_mean",
        ),
        ("config.json", {"vision_config": None}, "needs a preset with"),
    ],
)
def test_what_the_layers_cannot_be(directory, tmp_path, file, change, message):
    path = vision.copied(directory, tmp_path / "changed") / file
    found = json.loads(path.read_text()) if path.is_file() else {}
    found = {k: v for k, v in (found | change).items() if v is not None}
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=message):
        loading.load_causal_lm(path.parent, vision=True)


def test_a_model_without_a_tower():
    with pytest.raises(ValueError, match="needs a preset with a vision tower"):
        loading.load_causal_lm(vision.SOURCE, vision=True)


@pytest.mark.parametrize("model_type", ["gemma4", "qwen3_5"])
def test_a_tower_that_is_not_run(tmp_path, model_type):
    """The text model alone is loaded of those families."""
    config = {
        "model_type": model_type,
        "text_config": {"model_type": f"{model_type}_text"},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a multimodal Gemma 3. Received: "):
        loading.load_causal_lm(tmp_path, vision=True)
