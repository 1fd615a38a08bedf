"""Gemma 3 and 4 with their vision towers, against transformers."""

import functools
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
from keras_posttrain.data.rows.images import Patches
from keras_posttrain.models import attention, gemma4_tower
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.vision import ImageBlocks
from tests import vision
from tests.support import in_ci

BOUND = 2e-5


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return vision.directory_of(request, tmp_path_factory)


@pytest.fixture(scope="module")
def task(directory):
    return shared_task(directory)


def make_task(directory, **settings):
    settings = {"sequence_length": 256, "dtype": "float32"} | settings
    return kpt.SFTTask.from_preset(directory, vision=True, **settings)


# Compiled once for all tests: they look, and train nothing.
shared_task = functools.cache(make_task)


def reference(model, rows, **sizes):
    """transformers' log-probabilities of each row's tokens but the first."""
    found = []
    for row in rows:
        given = vision.inputs(row, model.config.model_type, **sizes)
        with torch.no_grad():
            logps = torch.log_softmax(model(**given).logits[0, :-1], -1)
        ids = given["input_ids"][0, 1:, None]
        found.append(logps.gather(1, ids)[:, 0].numpy())
    return found


def check(task, rows, expected):
    for ours, theirs in zip(task.log_probs(rows), expected, strict=True):
        np.testing.assert_allclose(ours[1:], theirs, rtol=0, atol=BOUND)


@vision.OF_ALL_KINDS
def test_rows_are_those_of_the_processor(directory, task):
    """Tokens and pixels are equal, and no token of an image carries loss."""
    rows, kind = vision.random_rows(), vision.kind_of(directory)
    examples, report = task.prepare(rows)
    assert (report.kept, len(rows)) == (4, 4)
    for row, example in zip(rows, examples):
        theirs = vision.inputs(row, kind)
        ids = theirs["input_ids"][0].numpy()
        np.testing.assert_array_equal(example.token_ids, ids)
        if "images" not in row:
            assert example.images is None
            continue
        of_images = theirs[vision.TYPES[kind]][0].numpy() == 1
        places = example.images.tokens
        np.testing.assert_array_equal(np.flatnonzero(of_images), places)
        assert example.completion_mask.any()
        assert not example.completion_mask[places].any()
        ours = vision.images_of(example.images, kind)
        for name, found in ours.items():
            np.testing.assert_allclose(found, theirs[name], atol=1e-6)


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


@vision.OF_ALL_KINDS
def test_log_probs_are_transformers(directory, task):
    rows = vision.random_rows((1, 2, 1, 0, 3))
    expected = reference(vision.load(directory), rows)
    check(task, rows, expected)
    # The images matter, each in its place.
    swapped = [{**rows[1], "images": rows[1]["images"][::-1]}]
    [other] = task.log_probs(swapped)
    assert np.abs(other[1:] - expected[1]).max() > 0.01


# What is unusual in Gemma 4: text and vision configs, and the most tokens of
# an image.
GEMMA4 = {
    # Causal, without inputs for each layer, heads that share keys.
    "causal": (
        {
            "use_bidirectional_attention": None,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        {
            "num_key_value_heads": 1,
            "patch_size": 3,
            "pooling_kernel_size": 3,
            "position_embedding_size": 18,
            "use_clipped_linears": False,
            "standardize": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
        },
        6,
    ),
    # The least tokens of published processors, more than the window; layers
    # that share keys and values, and experts.
    "long": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        {"position_embedding_size": 280, "patch_size": 2},
        70,
    ),
}


@pytest.mark.parametrize("tokens", in_ci(70, 280, of=[70, 280, 1120]))
def test_the_published_sizes_of_images(tokens):
    """Of Gemma 4: photographs, icons, strips, and what needs no resizing."""
    processor = vision.pil_gemma4.Gemma4ImageProcessorPil(
        max_soft_tokens=tokens
    )
    sizes, rng = Patches(16, 3, tokens), np.random.default_rng(0)
    shapes = (480, 640), (1200, 700), (16, 16), (7, 900), (1000, 1), (48, 96)
    for shape in shapes:
        image = rng.integers(0, 256, (*shape, 3), np.uint8)
        theirs = processor(image, return_tensors="np")
        patches, grid = sizes.read(Image.fromarray(image))
        assert sizes.count(grid) == theirs["num_soft_tokens_per_image"][0]
        np.testing.assert_allclose(
            patches / 255, theirs["pixel_values"][0], atol=1e-6
        )
        places = gemma4_tower.patch_places(grid, len(patches))
        expected = theirs["image_position_ids"][0]
        np.testing.assert_array_equal(places, expected)


@pytest.mark.parametrize("name", GEMMA4)
def test_variants_of_gemma4(name, tmp_path):
    """Log-probabilities of images of any shape, a strip among them."""
    text, tower, tokens = GEMMA4[name]
    directory = vision.make_directory(
        tmp_path / "model",
        kind="gemma4",
        tokens=tokens,
        text_config={**vision.TEXT4, **text},
        vision_config={**vision.VISION4, **tower},
    )
    rows = vision.random_rows((1, 2, 0), seed=4)
    rows[0]["images"] = [rows[0]["images"][0][:9].repeat(9, axis=1)]
    sizes = {**vision.VISION4, **tower}
    expected = reference(
        vision.load(directory),
        rows,
        tokens=tokens,
        patch_size=sizes["patch_size"],
        pool=sizes["pooling_kernel_size"],
    )
    task = make_task(directory, sequence_length=512)
    counts = task.prepare(rows)[0][0].images.grids
    assert len({*counts[0].tolist()}) == 2
    check(task, rows, expected)


@vision.OF_GEMMA4
def test_tokens_of_another_size(task):
    """Rows that are tokens have as many for an image as its shape makes."""
    [row] = vision.random_rows((1,))
    [example] = task.prepare([row])[0]
    ids, places = example.token_ids.tolist(), example.images.tokens
    given = {"completion_mask": [1.0] * len(ids), "images": row["images"]}
    [found] = task.prepare([{**given, "token_ids": ids}])[0]
    np.testing.assert_array_equal(found.images.places, example.images.places)
    fewer, more = ids.copy(), ids.copy()
    fewer[places[0]] = 9
    more[places[-1] + 1] = vision.TOKEN_ID
    for changed in fewer, more:
        with pytest.raises(ValueError, match=f"must have {len(places)} adj"):
            task.prepare([{**given, "token_ids": changed}])
    # Those of a sampled image are no image.
    reader = task.row_settings("dataset").images
    assert reader.count(ids) == 1
    assert reader.count(ids[: places[-1] + 1]) == 0


@vision.OF_GEMMA4
def test_equal_patches_of_other_shapes(task):
    """Images are other images where only their shapes differ."""
    [row] = vision.random_rows((1,))
    flat = np.full((20, 30, 3), 7, "uint8")
    shapes = flat, flat.transpose(1, 0, 2)
    found = [
        task.prepare([{**row, "images": [image]}])[0][0].images
        for image in shapes
    ]
    np.testing.assert_array_equal(*(x.pixels for x in found))
    assert found[0].digest != found[1].digest
    assert (found[0].token_keys != found[1].token_keys).any()


@vision.OF_GEMMA4
def test_tokens_of_images_without_images(directory, task):
    """As transformers does, they are embedded as padding, and so are those
    of sound and videos."""
    control = len(vision.CONTROL4)
    ids = [2, 7, *range(vision.TOKEN_ID, vision.TOKEN_ID + control), 9, 4]
    ids.remove(vision.TOKEN_ID)
    with torch.no_grad():
        logits = vision.load(directory)(input_ids=torch.tensor([ids])).logits
    expected = torch.log_softmax(logits[0, :-1], -1)
    expected = expected.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    mask = [1.0] * len(ids)
    row = {"token_ids": ids, "completion_mask": mask}
    check(task, [row], [expected.numpy()])


@vision.OF_ALL_KINDS
def test_packed_rows_are_rows_alone(directory, task):
    rows = vision.random_rows((1, 2, 0, 3), seed=3)
    expected = reference(vision.load(directory), rows)
    examples, _ = task.prepare(rows)
    batches = task.make_batches(
        examples, 1, packing=True, sequence_length=400, shuffle=False
    )
    batch = next(iter(batches.get_jax_iterator()))
    assert batch["segment_ids"].max() == len(rows)
    sizes = task.row_settings("dataset").images.sizes
    assert batch["pixels"].shape == (1, 8, *sizes.shape)
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


@vision.OF_ALL_KINDS
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


@vision.OF_ALL_KINDS
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


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_model_that_keras_hub_made(kind, tmp_path):
    """It has no config of Hugging Face's; its export and preset have one."""
    causal_lm = {"gemma3": hub_gemma3, "gemma4": hub_gemma4}[kind]()
    causal_lm.save_to_preset(tmp_path / "hub")
    tokenizer = vision.make_processor(kind).tokenizer
    template = vision.read_template(kind)
    settings = {"sequence_length": 400}
    task = make_task(
        tmp_path / "hub",
        tokenizer=tokenizer,
        chat_template=template,
        **settings,
    )
    task.export(tmp_path / "out")
    rows = vision.random_rows((1, 0))
    # An image of a KerasHub Gemma 4 has the tokens of published models.
    sizes = {"tokens": 280} if kind == "gemma4" else {}
    model = vision.load(tmp_path / "out")
    expected = reference(model, rows, **sizes)
    check(task, rows, expected)
    check(make_task(tmp_path / "out", **settings), rows, expected)


def hub_gemma3():
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
    return keras_hub.models.Gemma3CausalLM(None, backbone)


def hub_gemma4():
    tower = keras_hub.models.Gemma4VisionEncoder(
        image_size=136, patch_size=4, num_heads=2, hidden_dim=24, head_dim=12,
        num_layers=1, intermediate_dim=40, output_dim=32, pool_size=2,
    )  # fmt: skip
    backbone = keras_hub.models.Gemma4Backbone(
        vocabulary_size=528, image_size=136, num_layers=2,
        num_query_heads=4, num_key_value_heads=2, hidden_dim=32,
        intermediate_dim=48, head_dim=16, sliding_window_size=12,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, use_vision_bidirectional_attention=True,
        vision_encoder=tower,
    )  # fmt: skip
    return keras_hub.models.Gemma4CausalLM(None, backbone)


@pytest.mark.parametrize(
    "directory, file, change, message",
    [
        (
            "gemma4",
            "config.json",
            {"vision_config": {**vision.VISION4, "head_dim": 8}},
            "vision_config.head_dim",
        ),
        (
            "gemma4",
            "config.json",
            {"vision_config": {**vision.VISION4, "attention_bias": True}},
            "vision_config.attention_bias",
        ),
        (
            "gemma4",
            "config.json",
            {
                "vision_config": {
                    **vision.VISION4,
                    "position_embedding_size": 9,
                }
            },
            "12 at least, the patches of the longest image",
        ),
        (
            "gemma4",
            "config.json",
            {
                "vision_config": {
                    **vision.VISION4,
                    "rope_parameters": {"rope_type": "linear"},
                }
            },
            "vision_config.rope_parameters",
        ),
        (
            "gemma4",
            "preprocessor_config.json",
            {"do_normalize": True},
            "do_normalize",
        ),
        (
            "gemma4",
            "preprocessor_config.json",
            {"patch_size": 8},
            "to the patches of the model: `patch_size` must be 4",
        ),
        (
            "gemma3",
            "config.json",
            {"mm_tokens_per_image": 9},
            "square of a divisor of 4",
        ),
        (
            "gemma3",
            "config.json",
            {"vision_config": {**vision.VISION, "hidden_act": "relu"}},
            "vision_config.hidden_act",
        ),
        (
            "gemma3",
            "preprocessor_config.json",
            {"do_pan_and_scan": True},
            "do_pan_and_scan",
        ),
        (
            "gemma3",
            "processor_config.json",
            {"image_processor": {"image_mean": [0.4, 0.5, 0.5]}},
            "image_mean",
        ),
        (
            "gemma3",
            "config.json",
            {"vision_config": None},
            "needs a preset with",
        ),
    ],
    indirect=["directory"],
)
def test_what_the_layers_cannot_be(directory, tmp_path, file, change, message):
    path = vision.copied(directory, tmp_path / "changed") / file
    found = json.loads(path.read_text()) if path.is_file() else {}
    found = {k: v for k, v in (found | change).items() if v is not None}
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=message):
        loading.load_causal_lm(path.parent, vision=True)


def test_the_tower_of_sound_is_left_out(tmp_path):
    """A line says so, and what is exported has no sound either."""
    sizes = {"hidden_size": 16, "output_proj_dims": 16}
    directory = vision.make_directory(
        tmp_path / "model",
        kind="gemma4",
        audio_config={
            **sizes,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
        },
    )
    task, rows = make_task(directory), vision.random_rows((1,))
    expected = reference(vision.load(directory), rows)
    check(task, rows, expected)
    assert "sound tower left out" in task.causal_lm.kpt_repairs[0]
    task.export(tmp_path / "out")
    model = vision.load(tmp_path / "out")
    assert model.model.audio_tower is None
    np.testing.assert_array_equal(reference(model, rows)[0], expected[0])


def test_a_model_without_a_tower():
    with pytest.raises(ValueError, match="needs a preset with a vision tower"):
        loading.load_causal_lm(vision.SOURCE, vision=True)


@pytest.mark.parametrize("model_type", ["gemma3n", "qwen3_5"])
def test_a_tower_that_is_not_run(tmp_path, model_type):
    """The text model alone is loaded of those families."""
    config = {
        "model_type": model_type,
        "text_config": {"model_type": f"{model_type}_text"},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a multimodal Gemma 3 or 4. Rec"):
        loading.load_causal_lm(tmp_path, vision=True)
