"""TRL: `SFTTrainer` on torch."""

import os
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import report
import torch
import torch_model
import workloads
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """The times at which steps end."""

    def __init__(self):
        self.marks = []

    def on_step_end(self, *args, **kwargs):
        self.marks.append(time.perf_counter())


def main():
    args = report.arguments()
    shape = args.shape
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # Without FlashAttention a batch of packed rows becomes one long row with a
    # dense mask: one row a pass is faster, and needs a quarter of the memory.
    micro = 1 if args.packing else shape.batch
    clock = Clock()
    trainer = SFTTrainer(
        model=torch_model.build(shape.model),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=shape.batch // micro,
            max_length=shape.length,
            packing=args.packing,
            num_train_epochs=1 + args.passes,
            train_sampling_strategy="sequential",
            learning_rate=workloads.LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=workloads.WEIGHT_DECAY,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
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
    start = time.perf_counter()
    trainer.train()
    # The first epoch is the warm-up.
    steps = len(clock.marks) // (1 + args.passes)
    ends = clock.marks[steps - 1 :: steps]
    history = trainer.state.log_history
    report.emit(
        args,
        ("trl", "torch", "transformers", "peft"),
        first_loss=next(h["loss"] for h in history if "loss" in h),
        first_step_s=clock.marks[0] - start,
        pass_s=[b - a for a, b in zip(ends, ends[1:], strict=False)],
        steps=steps,
    )


if __name__ == "__main__":
    main()
