"""A tiny multimodal Gemma 3 of transformers, and rows with images."""

import functools
import json
import pathlib
import shutil

import numpy as np
import tokenizers
import torch
import transformers

from keras_posttrain.data.chat.conversion import read_template
from tests.support import REFERENCE

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


def make_directory(directory, seed=0, **fields):
    """Writes a random multimodal Gemma 3, as transformers saves it.

    `fields` replace those of the config.
    """
    config = {
        "text_config": TEXT,
        "vision_config": VISION,
        "mm_tokens_per_image": NUM_TOKENS,
        "image_token_index": TOKEN_ID,
        "boi_token_index": TOKEN_ID + 1,
        "eoi_token_index": TOKEN_ID + 2,
    }
    config = transformers.Gemma3Config(**{**config, **fields})
    torch.manual_seed(seed)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # So that no norm and no bias is at its initial value, and images
            # matter as much as text.
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    make_processor().save_pretrained(directory)
    directory = pathlib.Path(directory)
    # The processor's own files name the template in another place.
    (directory / "chat_template.jinja").write_text(read_template("gemma3"))
    return directory


@functools.cache
def make_processor():
    """Makes transformers' processor, with a tokenizer of 515 tokens."""
    backend = tokenizers.Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    backend.add_special_tokens(list(CONTROL))
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    given = json.loads((SOURCE / "tokenizer_config.json").read_text())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=dict(zip(NAMES, CONTROL)),
        **{name: given[name] for name in names},
    )
    images = transformers.models.gemma3.image_processing_pil_gemma3
    return transformers.Gemma3Processor(
        images.Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}),
        tokenizer,
        chat_template=read_template("gemma3"),
        image_seq_length=NUM_TOKENS,
    )


def load(directory):
    """Loads the model with transformers."""
    kind = transformers.Gemma3ForConditionalGeneration
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


def inputs(row):
    """What transformers' processor makes of a row, on its own."""
    processor = make_processor()
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    found = processor(
        text=[text],
        images=[row["images"]] if row.get("images") else None,
        add_special_tokens=False,
        return_tensors="pt",
        return_mm_token_type_ids=True,
    )
    return {k: v for k, v in found.items() if k != "num_crops"}


def copied(source, directory):
    """Copies a checkpoint, to change its files."""
    shutil.copytree(source, directory)
    return directory
