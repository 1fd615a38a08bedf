"""KerasHub: `CausalLM.fit` on JAX."""

import time

import keras_hub_model  # sets the backend

# isort: split
import keras
import report
import workloads


def main():
    args = report.arguments(packing=False)
    shape = args.shape
    # `fit` does not shift tokens: inputs and targets are cut from one array.
    ids, mask, loss_mask = workloads.padded(args.rows, shape.length + 1)
    x = {"token_ids": ids[:, :-1], "padding_mask": mask[:, :-1]}
    y, weight = ids[:, 1:], loss_mask[:, 1:].astype("float32")

    model = keras_hub_model.build(shape.model)
    if args.lora:
        names = [
            path.split("/")[-1] for path in keras_hub_model.LAYERS.values()
        ]
        model.backbone.enable_lora(
            workloads.LORA_RANK, target_layer_names=names
        )
    model.compile(
        optimizer=keras.optimizers.AdamW(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        # The default also divides by masked tokens.
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
