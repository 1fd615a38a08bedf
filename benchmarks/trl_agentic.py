"""TRL: `GRPOTrainer` with a tool; transformers samples.

Random weights call no tool, so what the trainer reads from a turn is replaced:
every turn but the last is a call. Sampling, the tool and its loop are TRL's.
"""

import asyncio
import os
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import agentic_steps
import torch
import torch_model
import workloads
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

WORK = workloads.AGENTIC


def parsed(tokenizer, ids, prefix=None, tools=None):
    """Returns the message of a turn, a call unless it is the last."""
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    ends = prefix.count(tokenizer.convert_tokens_to_ids(workloads.END_OF_TURN))
    if ends < WORK.turns:
        call = {"name": workloads.TOOL, "arguments": {"turn": ends}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


class Trainer(GRPOTrainer):
    """Measures rollouts and counts their tokens."""

    def _generate(self, prompts):
        start = time.perf_counter()
        out = super()._generate(prompts)
        self.seconds.append(time.perf_counter() - start)
        self.tokens = sum(map(sum, out[2]))
        return out


def main():
    args = agentic_steps.arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = 1 + args.passes

    async def tool(turn: int) -> str:
        """Says what follows.

        Args:
            turn: the number of the turn.
        """
        await asyncio.sleep(args.tool_seconds)
        return WORK.words(WORK.said_words, turn)

    tool.__name__ = workloads.TOOL
    tokenizer = torch_model.tokenizer(WORK.model.vocab, chat=True)
    # Any: it says that calls can be read.
    tokenizer.response_template = {}
    grpo_trainer.parse_response = parsed
    trainer = Trainer(
        model=torch_model.build(WORK.model),
        reward_funcs=[
            lambda completions, **columns: [
                float(i % 2) for i in range(len(completions))
            ]
        ],
        tools=[tool],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=WORK.conversations,
            num_generations=WORK.samples,
            max_completion_length=WORK.longest,
            temperature=1.0,
            generation_kwargs={
                "min_new_tokens": WORK.tokens,
                "max_new_tokens": WORK.tokens,
            },
            beta=0.0,
            num_iterations=1,
            shuffle_dataset=False,
            max_steps=steps,
            learning_rate=workloads.LEARNING_RATE,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(
            {
                "prompt": [
                    [
                        {
                            "role": "user",
                            "content": WORK.words(WORK.prompt_words, 100 + i),
                        }
                    ]
                    for i in range(WORK.prompts * steps)
                ]
            }
        ),
        processing_class=tokenizer,
        peft_config=torch_model.lora(),
    )
    trainer.seconds = []
    trainer.train()
    agentic_steps.emit(
        ("trl", "torch", "transformers"), trainer.seconds, trainer.tokens
    )


if __name__ == "__main__":
    main()
