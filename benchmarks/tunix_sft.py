"""Tunix: `PeftTrainer` on JAX. Rows are packed here, as it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
import tunix_model
import workloads
from flax import nnx
from tunix.sft import peft_trainer, utils


def packed(rows, length, batch):
    """Packs rows, with empty rows up to a full number of batches."""
    bins = workloads.pack([len(ids) for ids, _ in rows], length)
    shape = (-(-len(bins) // batch) * batch, length)
    names = ("ids", "segments", "positions", "loss_mask")
    out = {name: np.zeros(shape, np.int32) for name in names}
    for b, members in enumerate(bins):
        at = 0
        for k, i in enumerate(members):
            ids, prompt = rows[i]
            where = slice(at, at + len(ids))
            out["ids"][b, where] = ids
            out["segments"][b, where] = k + 1
            out["positions"][b, where] = np.arange(len(ids))
            out["loss_mask"][b, at + prompt : at + len(ids)] = 1
            at += len(ids)
    return out


def packed_inputs(x):
    same = x["segments"][:, :, None] == x["segments"][:, None, :]
    length = same.shape[-1]
    return {
        "input_tokens": x["ids"],
        "input_mask": x["loss_mask"],
        "positions": x["positions"],
        "attention_mask": same & jnp.tril(jnp.ones((length, length), bool)),
    }


def padded_inputs(x):
    mask = x["mask"].astype(bool)
    return {
        "input_tokens": x["ids"],
        "input_mask": x["loss_mask"],
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def batches(args):
    length, batch = args.shape.length, args.shape.batch
    if args.packing:
        columns = packed(args.rows, length, batch)
    else:
        arrays = workloads.padded(args.rows, length)
        names = ("ids", "mask", "loss_mask")
        columns = dict(zip(names, arrays, strict=True))
    return [
        {k: v[i : i + batch] for k, v in columns.items()}
        for i in range(0, len(columns["ids"]), batch)
    ]


def main():
    args = report.arguments()
    data = batches(args)
    net = tunix_model.build(args.shape.model)
    trainer = peft_trainer.PeftTrainer(
        tunix_model.with_lora(net, args.quantize) if args.lora else net,
        optax.adamw(
            workloads.LEARNING_RATE, weight_decay=workloads.WEIGHT_DECAY
        ),
        peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=None),
    ).with_gen_model_input_fn(packed_inputs if args.packing else padded_inputs)
    metrics = tunix_model.keep_metrics(trainer)
    figures = tunix_model.timed_passes(trainer, data, args.passes)
    arrays = jax.tree.leaves(nnx.state(trainer.model))
    report.emit(
        args,
        ("google-tunix", "flax", "jax", "optax", "qwix"),
        first_loss=metrics["loss"][0],
        weights_gb=sum(x.size * x.dtype.itemsize for x in arrays) / 2**30,
        **figures,
    )


if __name__ == "__main__":
    main()
