"""TRL: `GRPOTrainer` on torch; transformers samples."""

import os
import statistics
import tempfile

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import grpo_steps
import torch
import torch_model
import workloads
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Records the ends of steps."""

    def __init__(self, log):
        self.log = log

    def on_train_begin(self, *args, **kwargs):
        self.log.start()

    def on_step_end(self, *args, **kwargs):
        # Time that is not spent on the batch is spent on training.
        train = self.log.seconds() - self.log.parts["collect"]
        self.log.step_ends(train=train)


class Trainer(GRPOTrainer):
    """Records the log-probs of the samples that it trains on."""

    log_of_steps = None

    def _compute_loss(self, model, inputs):
        self._mask = inputs["completion_mask"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        logps = out[0].detach().double()
        self.log_of_steps.record_tokens(
            self._mask.sum(), (logps * self._mask).sum()
        )
        return out


def main():
    args = grpo_steps.arguments()
    work, log = args.work, grpo_steps.Log()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def even_share(completion_ids, **kwargs):
        return [log.reward(ids) for ids in completion_ids]

    trainer = Trainer(
        model=torch_model.build(work.model),
        reward_funcs=[even_share],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=work.completions,
            num_generations=work.samples,
            max_completion_length=work.max_tokens,
            temperature=1.0,
            generation_kwargs={"min_new_tokens": work.max_tokens},
            beta=0.0,
            num_iterations=1,
            shuffle_dataset=False,
            max_steps=args.steps,
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
                "prompt": [
                    " ".join(f"t{i}" for i in ids)
                    for ids in work.prompt_ids(args.steps)
                ]
            }
        ),
        processing_class=torch_model.tokenizer(work.model.vocab),
        peft_config=torch_model.lora(),
        callbacks=[Clock(log)],
    )
    trainer.log_of_steps = log
    # The policy samples, so there is nothing to sync.
    for part, name in (
        ("rollout", "_generate"),
        ("reward", "_calculate_rewards"),
        ("collect", "_generate_and_score_completions"),
    ):
        setattr(trainer, name, log.timed(part, getattr(trainer, name)))
    trainer.train()
    history = [h for h in trainer.state.log_history if "loss" in h]
    grpo_steps.emit(
        args,
        ("trl", "torch", "transformers", "peft"),
        log,
        first_loss=history[0]["loss"],
        grad_norm=statistics.median(h["grad_norm"] for h in history),
    )


if __name__ == "__main__":
    main()
