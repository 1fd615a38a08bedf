"""TRL: `GKDTrainer` on torch, from stored rows."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import report
import torch
import torch_model
import torch_run
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer


def collated(examples):
    """Returns a batch of full rows, whose first tokens have no label."""
    ids = torch.tensor([example["input_ids"] for example in examples])
    labels = ids.clone()
    labels[:, 0] = -100
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    args = report.distill_arguments()
    work, epochs = args.work, 1 + args.passes
    clock = torch_run.Clock()
    trainer = GKDTrainer(
        model=torch_model.build(work.student),
        teacher_model=torch_model.build(work.teacher, work.teacher_seed),
        args=GKDConfig(
            **torch_run.settings(),
            per_device_train_batch_size=work.batch,
            max_length=work.length,
            num_train_epochs=epochs,
            lmbda=0.0,  # nothing is sampled
            beta=0.0,  # forward KL
        ),
        data_collator=collated,
        train_dataset=Dataset.from_dict({"input_ids": args.rows}),
        processing_class=torch_model.tokenizer(work.student.vocab),
        callbacks=[clock],
    )
    logs, figures = clock.train(trainer, epochs)
    report.emit(
        args,
        ("trl", "torch", "transformers"),
        first_loss=logs[0]["loss"],
        grad_norm=logs[0]["grad_norm"],
        **figures,
    )


if __name__ == "__main__":
    main()
