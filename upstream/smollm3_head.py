"""KerasHub does not read the head of a SmolLM3 that is not tied."""

import tempfile

import keras_hub
import numpy as np
import torch
import transformers

ids = np.arange(3, 15)[None]
config = transformers.SmolLM3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    rope_theta=10_000.0,
    pad_token_id=0,
)
model = transformers.SmolLM3ForCausalLM(config).eval()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    expected = model(torch.tensor(ids)).logits.numpy()
    causal_lm = keras_hub.models.CausalLM.from_preset(
        folder, preprocessor=None, dtype="float32"
    )
inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
hidden = causal_lm.backbone(inputs)
found = causal_lm.backbone.token_embedding(hidden, reverse=True)
difference = np.abs(np.array(found) - expected).max()
print(f"expected logits within 1e-4, found a difference of {difference:.3f}")
