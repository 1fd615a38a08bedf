"""Tunix: `DistillationTrainer` with its logit strategy, on JAX."""

import jax
import numpy as np
import optax
import report
import tunix_model
import workloads
from tunix.distillation import distillation_trainer, strategies
from tunix.sft import utils


def inputs(x):
    mask = x.input_tokens != workloads.PAD
    return {
        "input_tokens": x.input_tokens,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def logits(model, input_tokens, positions, attention_mask):
    """Returns the logits that predict a token, as Tunix averages over all."""
    out, _ = model(input_tokens, positions, None, attention_mask)
    return out[:, :-1]


def main():
    args = report.distill_arguments()
    work = args.work

    def labels(input_tokens, **kwargs):
        return jax.nn.one_hot(input_tokens[:, 1:], work.student.vocab)

    ids = np.array(args.rows, np.int32)
    data = [
        distillation_trainer.TrainingInput(
            input_tokens=ids[i : i + work.batch],
            input_mask=np.ones_like(ids[i : i + work.batch]),
        )
        for i in range(0, len(ids), work.batch)
    ]
    trainer = distillation_trainer.DistillationTrainer(
        tunix_model.build(work.student),
        tunix_model.build(work.teacher, work.teacher_seed),
        strategies.LogitStrategy(
            logits, logits, labels, temperature=1.0, alpha=1.0
        ),
        optax.adamw(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        distillation_trainer.TrainingConfig(
            eval_every_n_steps=10**9, max_steps=None
        ),
    ).with_gen_model_input_fn(inputs)
    metrics = tunix_model.keep_metrics(trainer)
    figures = tunix_model.timed_passes(trainer, data, args.passes)
    report.emit(
        args,
        ("google-tunix", "flax", "jax", "optax"),
        first_loss=metrics["loss"][0],
        **figures,
    )


if __name__ == "__main__":
    main()
