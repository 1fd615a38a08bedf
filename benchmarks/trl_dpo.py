"""TRL: `DPOTrainer` on torch; the reference is the model without adapter."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import report
import torch_model
import torch_run
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def text(ids):
    return " ".join(f"t{i}" for i in ids)


def main():
    args = report.pair_arguments()
    work, epochs = args.work, 1 + args.passes
    clock = torch_run.Clock()
    columns = zip(*args.pairs, strict=True)
    prompts, *sides = [list(column) for column in columns]
    # The trainer tokenizes, and appends the end token.
    chosen, rejected = [
        [f" {text(ids[:-1])}</s>" for ids in side] for side in sides
    ]
    trainer = DPOTrainer(
        model=torch_model.build(work.model),
        args=DPOConfig(
            **torch_run.settings(),
            per_device_train_batch_size=work.batch,
            max_length=None,
            beta=work.beta,
            num_train_epochs=epochs,
        ),
        train_dataset=Dataset.from_dict(
            {
                "prompt": [text(ids) for ids in prompts],
                "chosen": chosen,
                "rejected": rejected,
            }
        ),
        processing_class=torch_model.tokenizer(work.model.vocab),
        peft_config=torch_model.lora(),
        callbacks=[clock],
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    got = [trainer.train_dataset[name] for name in names]
    if [list(map(list, column)) for column in got] != [prompts, *sides]:
        raise ValueError("The tokenizer changed the token ids.")
    logs, figures = clock.train(trainer, epochs)
    report.emit(
        args,
        ("trl", "torch", "transformers", "peft"),
        first_loss=logs[0]["loss"],
        chosen_logp=logs[0]["logps/chosen"],
        rejected_logp=logs[0]["logps/rejected"],
        grad_norm=logs[0]["grad_norm"],
        **figures,
    )


if __name__ == "__main__":
    main()
