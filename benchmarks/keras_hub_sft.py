"""KerasHub alone: `CausalLM.fit` on JAX."""

import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import numpy as np
import report
import workloads

LAYERS = {
    "q_proj": "self_attention/query",
    "k_proj": "self_attention/key",
    "v_proj": "self_attention/value",
    "o_proj": "self_attention/attention_output",
    "gate_proj": "feedforward_gate_dense",
    "up_proj": "feedforward_intermediate_dense",
    "down_proj": "feedforward_output_dense",
}
NORMS = {
    "input_layernorm": "self_attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}


def place(name):
    """The KerasHub variable path of a Hugging Face tensor name."""
    fixed = {
        "model.embed_tokens.weight": "token_embedding/embeddings",
        "model.norm.weight": "sequence_output_layernorm/scale",
        "lm_head.weight": "token_embedding/reverse_embeddings",
    }
    if name in fixed:
        return fixed[name]
    _, _, i, *_, last, _ = name.split(".")
    if last in NORMS:
        return f"transformer_layer_{i}/{NORMS[last]}/scale"
    return f"transformer_layer_{i}/{LAYERS[last]}/kernel"


def build(model):
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=model.vocab,
        num_layers=model.layers,
        num_query_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        hidden_dim=model.hidden,
        intermediate_dim=model.intermediate,
        rope_max_wavelength=model.rope_theta,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tied,
        dtype="float32",
    )
    variables = {v.path: v for v in backbone.weights}
    for name, value in model.weights().items():
        variable = variables.pop(place(name))
        # Kernels are (in, out), with heads as an axis of their own.
        if not name.endswith("embed_tokens.weight"):
            value = value.T.reshape(variable.shape)
        variable.assign(np.ascontiguousarray(value))
    if variables:
        raise ValueError(f"Weights not set: {sorted(variables)}.")
    return keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)


def main():
    args = report.arguments(packing=False)
    shape = args.shape
    # `fit` does not shift: one more column, then inputs and targets.
    ids, mask, loss_mask = workloads.padded(args.rows, shape.length + 1)
    x = {"token_ids": ids[:, :-1], "padding_mask": mask[:, :-1]}
    y, weight = ids[:, 1:], loss_mask[:, 1:].astype("float32")

    model = build(shape.model)
    if args.lora:
        names = [path.split("/")[-1] for path in LAYERS.values()]
        model.backbone.enable_lora(
            workloads.LORA_RANK, target_layer_names=names
        )
    model.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        # Its default divides by masked tokens too.
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[],
    )

    def fit(count):
        start = time.perf_counter()
        history = model.fit(
            {k: v[:count] for k, v in x.items()},
            y[:count],
            sample_weight=weight[:count],
            batch_size=shape.batch,
            shuffle=False,
            verbose=0,
        )
        return time.perf_counter() - start, history.history["loss"][0]

    first_step_s, first_loss = fit(shape.batch)
    report.emit(
        args,
        ("keras", "keras-hub", "jax"),
        first_loss=first_loss,
        first_step_s=first_step_s,
        pass_s=[fit(len(args.rows))[0] for _ in range(args.passes)],
        steps=shape.steps(args.rows),
    )


if __name__ == "__main__":
    main()
