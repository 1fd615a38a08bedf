"""Tiny multimodal Gemma 3 and 4 of transformers, and rows with images."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers import video_processing_utils

from keras_posttrain.data.chat.conversion import read_template
from tests.support import REFERENCE, in_ci

SIZE, NUM_TOKENS = 28, 4
SOURCE = REFERENCE / "models" / "gemma3_text"
CONTROL = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
NAMES = ("image_token", "boi_token", "eoi_token")
TOKEN_ID = 512
# Shorter than a row, and longer than an image.
TEXT = {
    "vocab_size": 520,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 1024,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 7,
    # Not KerasHub's own, which its layers would have without a repair.
    "layer_norm_eps": 1e-3,
    "vision_use_head": False,
}


# Of Gemma 4, the same tokens and then those around sound and videos.
CONTROL4 = (
    "<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>",
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|video|>",
)  # fmt: skip
NAMES4 = (*NAMES, "audio_token", "boa_token", "eoa_token")
# An image has up to so many tokens, of 2 x 2 patches of 4 x 4 pixels.
MAX_TOKENS = 6
TEXT4 = {
    **{k: v for k, v in TEXT.items() if k != "query_pre_attn_scalar"},
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 520,
    "use_bidirectional_attention": "vision",
    "vocab_size": 528,
}
TEXT4["vocab_size_per_layer_input"] = TEXT4["vocab_size"]
VISION4 = {
    "model_type": "gemma4_vision",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 20,
    "use_clipped_linears": True,
    "standardize": True,
    "rms_norm_eps": 1e-3,
}
# The published processors have 70 tokens and more.
pil_gemma4 = transformers.models.gemma4.image_processing_pil_gemma4
pil_gemma4._SUPPORTED_SOFT_TOKENS += (MAX_TOKENS,)


class NoVideos(video_processing_utils.BaseVideoProcessor):
    """A part of Gemma 4's processor; its own one needs Torchvision."""


class Processor4(transformers.Gemma4Processor):
    """Gemma 4's with a part for videos of any class."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def config_of(kind, fields):
    """Returns the config of a tiny model; `fields` replace its own."""
    if kind == "gemma3":
        config = {
            "text_config": TEXT,
            "vision_config": VISION,
            "mm_tokens_per_image": NUM_TOKENS,
            "image_token_index": TOKEN_ID,
            "boi_token_index": TOKEN_ID + 1,
            "eoi_token_index": TOKEN_ID + 2,
        }
        return transformers.Gemma3Config(**{**config, **fields})
    names = (
        "image_token_id", "boi_token_id", "eoi_token_id", "audio_token_id",
        "boa_token_id", "eoa_token_index",
    )  # fmt: skip
    config = {
        "text_config": TEXT4,
        "vision_config": VISION4,
        **{name: TOKEN_ID + i for i, name in enumerate(names)},
        "video_token_id": TOKEN_ID + CONTROL4.index("<|video|>"),
    }
    return transformers.Gemma4Config(**{**config, **fields})


def make_directory(directory, seed=0, kind="gemma3", tokens=None, **fields):
    """Writes a random multimodal Gemma 3 or 4, as transformers saves it.

    `fields` replace those of the config, `tokens` the most tokens of an image
    of Gemma 4.
    """
    config = config_of(kind, fields)
    torch.manual_seed(seed)
    model = class_of(kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # So that no norm and no bias is at its initial value, and images
            # matter as much as text.
            parameter.add_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):
                # Narrow enough to clip some values.
                buffer.fill_(-1.2 if name.endswith("_min") else 1.5)
            elif "std_" in name:
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    vision = config.vision_config
    make_processor(
        kind,
        tokens or MAX_TOKENS,
        *(
            (vision.patch_size, vision.pooling_kernel_size)
            if kind == "gemma4"
            else ()
        ),
    ).save_pretrained(directory)
    directory = pathlib.Path(directory)
    # The processor's own files name the template in another place.
    (directory / "chat_template.jinja").write_text(read_template(kind))
    return directory


@functools.cache
def make_processor(kind="gemma3", tokens=MAX_TOKENS, patch_size=4, pool=2):
    """Makes transformers' processor, with a tokenizer of some 520 tokens.

    The sizes are those of Gemma 4.
    """
    control, names = (CONTROL, NAMES)
    if kind == "gemma4":
        control, names = (CONTROL4, NAMES4)
    backend = tokenizers.Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    backend.add_special_tokens(list(control))
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    given = json.loads((SOURCE / "tokenizer_config.json").read_text())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=dict(zip(names, control)),
        **{name: given[name] for name in special},
    )
    template = read_template(kind)
    if kind == "gemma4":
        images = pil_gemma4.Gemma4ImageProcessorPil(
            patch_size=patch_size,
            pooling_kernel_size=pool,
            max_soft_tokens=tokens,
        )
        return Processor4(
            transformers.Gemma4AudioFeatureExtractor(),
            images,
            tokenizer,
            NoVideos(),
            chat_template=template,
            image_seq_length=tokens,
        )
    images = transformers.models.gemma3.image_processing_pil_gemma3
    return transformers.Gemma3Processor(
        images.Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}),
        tokenizer,
        chat_template=template,
        image_seq_length=NUM_TOKENS,
    )


def class_of(kind):
    """Returns transformers' class of a family."""
    return {
        "gemma3": transformers.Gemma3ForConditionalGeneration,
        "gemma4": transformers.Gemma4ForConditionalGeneration,
    }[kind]


def kind_of(directory):
    """Returns the family of a checkpoint."""
    config = json.loads((pathlib.Path(directory) / "config.json").read_text())
    return config["model_type"]


def load(directory):
    """Loads the model with transformers."""
    kind = class_of(kind_of(directory))
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


def random_rows(counts=(1, 2, 1, 0), seed=0):
    """Conversations with so many images each, of unequal lengths."""
    rng = np.random.default_rng(seed)
    words = ["red", "green\n", "the house is", "what", "left of it", "12"]
    rows = []
    for count in counts:
        parts = [{"type": "text", "text": " ".join(rng.choice(words, 3))}]
        for _ in range(count):
            text = " ".join(rng.choice(words, rng.integers(1, 5)))
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        answer = " ".join(rng.choice(words, rng.integers(1, 6)))
        row = {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": answer},
            ]
        }
        if count:
            row["images"] = [
                rng.integers(0, 256, (*rng.integers(9, 60, 2), 3), np.uint8)
                for _ in range(count)
            ]
        rows.append(row)
    return rows


def inputs(row, kind="gemma3", **sizes):
    """What transformers' processor makes of a row, on its own."""
    processor = make_processor(kind, **sizes)
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    found = processor(
        text=[text],
        images=[row["images"]] if row.get("images") else None,
        add_special_tokens=False,
        return_tensors="pt",
        return_mm_token_type_ids=True,
    )
    return {k: v for k, v in found.items() if k not in _UNREAD}


# What a template writes before an answer.
HEADERS = {
    "gemma3": "<start_of_turn>model\n",
    "gemma4": "<|turn>model\n",
}
# The arrays that tell images' tokens from others.
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}


def images_of(images, kind):
    """The inputs of transformers' model that `Images` are, by name."""
    if kind == "gemma3":
        pixels = (images.pixels.transpose(0, 3, 1, 2) / 255 - 0.5) * 2
        return {"pixel_values": pixels.astype("float32")}
    positions = np.full((*images.pixels.shape[:2], 2), -1)
    for found, (height, width) in zip(positions, images.grids):
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        found[: height * width] = np.stack([x, y], -1).reshape(-1, 2)
    return {
        "pixel_values": (images.pixels / 255).astype("float32"),
        "image_position_ids": positions,
    }


# What the processors return, and the models do not take.
_UNREAD = ("num_crops", "num_soft_tokens_per_image")


# For tests of all families; others have a Gemma 3.
OF_ALL_KINDS = pytest.mark.parametrize(
    "directory", ["gemma3", "gemma4"], indirect=True
)
GEMMA4_IN_CI = pytest.mark.parametrize(
    "directory", in_ci("gemma4", of=["gemma3", "gemma4"]), indirect=True
)
OF_GEMMA4 = pytest.mark.parametrize("directory", ["gemma4"], indirect=True)


_made = {}


def directory_of(request, tmp_path_factory, tower_layers=2):
    """Returns the directory of a fixture, of the family of its parameter.

    It is made once: pytest sets up the fixture again whenever the parameter
    changes. To change its files, copy it.
    """
    kind = getattr(request, "param", "gemma3")
    if (kind, tower_layers) not in _made:
        tower = {"gemma3": VISION, "gemma4": VISION4}[kind]
        _made[kind, tower_layers] = make_directory(
            tmp_path_factory.mktemp(kind) / "model",
            kind=kind,
            vision_config={**tower, "num_hidden_layers": tower_layers},
        )
    return _made[kind, tower_layers]


def copied(source, directory):
    """Copies a checkpoint, to change its files."""
    shutil.copytree(source, directory)
    return directory
