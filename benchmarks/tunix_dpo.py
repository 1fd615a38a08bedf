"""Tunix: `DPOTrainer` on JAX; the reference shares the policy's weights."""

import numpy as np
import optax
import report
import tunix_model
import workloads
from tunix.sft.dpo import dpo_trainer


def filled(rows, width, left=False):
    """Returns padded ids and their mask, int32 `(rows, width)`."""
    ids = np.full((len(rows), width), workloads.PAD, np.int32)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


def batches(args):
    work, inputs = args.work, []
    for i in range(0, len(args.pairs), work.batch):
        group = args.pairs[i : i + work.batch]
        prompts, chosen, rejected = zip(*group, strict=True)
        prompts = filled(prompts, work.longest_prompt, left=True)
        chosen, rejected = [
            filled(x, work.longest) for x in (chosen, rejected)
        ]
        inputs.append(
            dpo_trainer.TrainingInput(
                prompt_ids=prompts[0],
                prompt_mask=prompts[1],
                chosen_ids=chosen[0],
                chosen_mask=chosen[1],
                rejected_ids=rejected[0],
                rejected_mask=rejected[1],
            )
        )
    return inputs


def main():
    args = report.pair_arguments()
    data = batches(args)
    base = tunix_model.build(args.work.model)
    trainer = dpo_trainer.DPOTrainer(
        tunix_model.with_lora(base),
        base,
        optax.adamw(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        dpo_trainer.DPOTrainingConfig(
            eval_every_n_steps=10**9, max_steps=None, beta=args.work.beta
        ),
    )
    metrics = tunix_model.keep_metrics(trainer)
    figures = tunix_model.timed_passes(trainer, data, args.passes)
    report.emit(
        args,
        ("google-tunix", "flax", "jax", "optax", "qwix"),
        first_loss=metrics["loss"][0],
        chosen_logp=float(metrics["log_probs/chosen"][0]),
        rejected_logp=float(metrics["log_probs/rejected"][0]),
        **figures,
    )


if __name__ == "__main__":
    main()
