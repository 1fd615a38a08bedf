"""TRL: `SFTTrainer` on torch."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import report
import torch_model
import torch_run
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main():
    args = report.arguments()
    shape = args.shape
    # Without FlashAttention a batch of packed rows becomes one long row with a
    # dense mask; one row per pass is faster and takes a quarter of the memory.
    micro = 1 if args.packing else shape.batch
    clock, epochs = torch_run.Clock(), 1 + args.passes
    trainer = SFTTrainer(
        model=torch_model.build(shape.model, quantize=args.quantize),
        args=SFTConfig(
            **torch_run.settings(),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=shape.batch // micro,
            max_length=shape.length,
            packing=args.packing,
            num_train_epochs=epochs,
        ),
        train_dataset=Dataset.from_dict(
            {
                "input_ids": [ids for ids, _ in args.rows],
                "labels": [[-100] * p + ids[p:] for ids, p in args.rows],
            }
        ),
        processing_class=torch_model.tokenizer(shape.model.vocab),
        peft_config=torch_model.lora() if args.lora else None,
        callbacks=[clock],
    )
    weights = trainer.model.get_memory_footprint()
    logs, figures = clock.train(trainer, epochs)
    report.emit(
        args,
        ("trl", "torch", "transformers", "peft", "bitsandbytes"),
        first_loss=logs[0]["loss"],
        weights_gb=weights / 2**30,
        **figures,
    )


if __name__ == "__main__":
    main()
