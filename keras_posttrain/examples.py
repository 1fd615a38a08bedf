"""A tiny preset, for guides, tests and bug reports."""

import pathlib

import keras
import keras_hub
import numpy as np
import tokenizers

from keras_posttrain.data.chat import conversion
from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.tasks.sft_task import SFTTask

__all__ = ["tiny_preset"]

VOCABULARY_SIZE = 512
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA_TOKENS = (
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<image_soft_token>", "<start_of_image>", "<end_of_image>",
)  # fmt: skip


def tiny_preset(
    directory,
    rows,
    *,
    epochs=0,
    num_layers=2,
    hidden_dim=64,
    vision=False,
    seed=0,
):
    """Writes a preset that is small enough for a laptop and for a test.

    The preset is a Hugging Face directory as it would be downloaded: a Qwen3
    model, a tokenizer and a chat template. `from_preset` loads it, and so do
    `transformers` and vLLM. The same arguments give the same files.

    - The model has 180,000 weights by default, in float32: two layers, four
      query heads and two key-value heads of size 32, a hidden size of 64 and
      tied embeddings. The weights are random, unless `epochs` is set.
    - The tokenizer is a byte-level BPE with at most 512 tokens and 3 control
      tokens, trained on the strings in `rows`. Like that of Qwen3 it encodes
      any text and splits numbers into digits.
    - The chat template is ChatML, with tools.

    It takes one or two seconds, and 5 to 30 with `epochs`, which is for
    models that should know something before a guide or a test begins.

    Args:
        directory: string or path, the folder to write. It is made where it
            is missing, and files in it are replaced.
        rows: list of strings, or of rows of any type. All strings in them
            train the tokenizer. With `epochs` they must also be rows that
            `kpt.SFTTask` takes; a string is taken for a text.
        epochs: int, how often the model is trained on `rows` before it is
            written, ten rows a step.
        num_layers: int, decoder layers.
        hidden_dim: int, a multiple of 32. The number of heads and the size
            of the feed-forward layers are in proportion to it.
        vision: bool, `True` for a Gemma 3 with a vision tower in place of
            the Qwen3, which reads images of 32 x 32 pixels as four tokens.
            Load it with `from_preset(..., vision=True)`.
        seed: int, for the weights and the order of the rows.

    Returns:
        `pathlib.Path`, the directory.

    Raises:
        ValueError: there is no text in `rows`, or `hidden_dim` is no multiple
            of 32.

    Example:

    ```python
    rows = [
        {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
        for a in range(10)
        for b in range(10)
    ]
    preset = kpt.examples.tiny_preset("tiny/", rows)
    task = kpt.SFTTask.from_preset(preset, sequence_length=32)
    task.compile(optimizer=keras.optimizers.AdamW(3e-3))
    task.fit(rows, batch_size=10, epochs=3)
    ```
    """
    if hidden_dim < 32 or hidden_dim % 32:
        raise ValueError(
            "`hidden_dim` must be a multiple of 32, so that it splits into "
            f"heads. Received: hidden_dim={hidden_dim}"
        )
    tokenizer = _train_tokenizer(rows, vision)
    make = _make_vision_model if vision else _make_model
    causal_lm = make(tokenizer, num_layers, hidden_dim, seed)
    task = SFTTask(causal_lm, tokenizer)
    if epochs:
        rows = [{"text": r} if isinstance(r, str) else r for r in rows]
        _, report = task.prepare(rows, name="rows")
        # One program for all batches, and no more padding than needed.
        task = SFTTask(causal_lm, tokenizer, sequence_length=report.longest)
        task.compile(keras.optimizers.AdamW(3e-3))
        task.fit(rows, batch_size=10, epochs=epochs, seed=seed, verbose=0)
    directory = pathlib.Path(directory)
    task.export(directory)
    return directory


def _train_tokenizer(rows, vision):
    """A `Tokenizer` whose words are those of the rows."""
    texts = list(_strings(rows))
    if not texts:
        raise ValueError(
            "`rows` must hold text, which the tokenizer is trained on. "
            f"Received: rows={rows!r}"
        )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = conversion.split_words(conversion.QWEN_SPLIT)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if vision:
        backend.add_special_tokens(list(GEMMA_TOKENS))
        names = ("pad", "eos", "bos")
        return Tokenizer(
            backend,
            {f"{name}_token": f"<{name}>" for name in names},
            chat_template=conversion.read_template("gemma3"),
        )
    backend.add_special_tokens(list(CONTROL_TOKENS))
    return Tokenizer(
        backend,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        chat_template=conversion.read_template("chatml"),
    )


def _strings(value):
    """All strings in nested rows."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _make_model(tokenizer, num_layers, hidden_dim, seed):
    """A `Qwen3CausalLM` with weights that depend on `seed` alone."""
    backbone = keras_hub.models.Qwen3Backbone(
        vocabulary_size=tokenizer.vocabulary_size,
        num_layers=num_layers,
        num_query_heads=hidden_dim // 16,
        num_key_value_heads=hidden_dim // 32,
        # The smallest that vLLM's kernels for CPUs know.
        head_dim=32,
        hidden_dim=hidden_dim,
        intermediate_dim=4 * hidden_dim,
        tie_word_embeddings=True,
    )
    _initialize(backbone.trainable_variables, hidden_dim, seed)
    return keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)


def _make_vision_model(tokenizer, num_layers, hidden_dim, seed):
    """A `Gemma3CausalLM` with a tower, as `_make_model` makes one."""
    tower = keras_hub.models.Gemma3VisionEncoder(
        image_size=32,
        patch_size=8,
        num_heads=2,
        hidden_dim=hidden_dim,
        num_layers=1,
        intermediate_dim=2 * hidden_dim,
        output_dim=hidden_dim,
        pool_size=2,
    )
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=tokenizer.vocabulary_size,
        image_size=32,
        num_layers=num_layers,
        num_query_heads=hidden_dim // 16,
        num_key_value_heads=hidden_dim // 32,
        head_dim=32,
        hidden_dim=hidden_dim,
        intermediate_dim=4 * hidden_dim,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        vision_encoder=tower,
    )
    _initialize(backbone.trainable_variables, hidden_dim, seed)
    return keras_hub.models.Gemma3CausalLM(None, backbone)


def _initialize(variables, hidden_dim, seed):
    # KerasHub's own initializers depend on Keras's global random state, and
    # their small weights would make a model of this size learn slowly.
    rng = np.random.default_rng(seed)
    for variable in variables:
        if len(variable.shape) > 1:
            values = rng.normal(0, hidden_dim**-0.5, variable.shape)
            variable.assign(values.astype("float32"))
