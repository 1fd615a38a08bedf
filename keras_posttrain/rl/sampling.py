"""Prompts to completions, judged."""

import dataclasses
import time

import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.rewards.run import run_rewards
from keras_posttrain.rollout.rollout import Request


@dataclasses.dataclass
class Group:
    """The completions of one prompt.

    Attributes:
        prompt: `Prompt`.
        completions: list of the engine's `Completion`s.
        texts: list of what rewards were shown: strings or messages, or ids
            where there is no tokenizer.
        rewards: float array of shape `(completions, functions)`, NaN where
            not judged; of a task without rewards there are no functions.
    """

    prompt: object
    completions: list
    texts: list
    rewards: np.ndarray


class Sampler:
    """Prompts to groups of judged completions.

    Args:
        task: `RolloutTask`, compiled.
        num_generations: int, completions a prompt.
        temperature: float.
        step: int, of the run, for messages.
    """

    def __init__(self, task, num_generations, temperature, step=0):
        self.task, self.step = task, step
        self.num_generations = num_generations
        self.temperature = temperature
        self.seconds = {"time/rollout": 0.0, "time/reward": 0.0}

    def __call__(self, prompts, seed):
        """A list of `Group`s, one a prompt."""
        return self.judged(prompts, self.drawn(prompts, seed))

    def drawn(self, prompts, seed):
        """A list with the list of completions of each prompt."""
        task, start = self.task, time.perf_counter()
        requests = [
            Request(
                prompt.token_ids,
                num_generations=self.num_generations,
                max_tokens=task.max_completion_length,
                temperature=self.temperature,
                stop_token_ids=task.stop_token_ids,
                seed=seed,
            )
            for prompt in prompts
        ]
        completions = task.generate_samples(requests)
        self.seconds["time/rollout"] += time.perf_counter() - start
        return completions

    def judged(self, prompts, completions):
        """A list of `Group`s, one a prompt."""
        start = time.perf_counter()
        texts = [
            [self._text(prompt, c.token_ids) for c in group]
            for prompt, group in zip(prompts, completions)
        ]
        rewards = self._rewards(prompts, completions, texts)
        self.seconds["time/reward"] += time.perf_counter() - start
        return [
            Group(*parts)
            for parts in zip(prompts, completions, texts, rewards)
        ]

    def _text(self, prompt, ids):
        tokenizer = self.task.tokenizer
        text = list(ids) if tokenizer is None else tokenizer.decode(ids)
        if isinstance(prompt.prompt, str) or tokenizer is None:
            return text
        return [{"role": "assistant", "content": text}]

    def _rewards(self, prompts, completions, texts):
        """Rewards of all groups, of which each process judges its share."""
        if not self.task.rewards:
            shape = len(prompts), self.num_generations, 0
            return np.zeros(shape, np.float32)
        if processes.count() == 1:
            return self._judge(prompts, completions, texts)
        own = processes.share(len(prompts))

        def judge():
            if not prompts[own]:
                return []
            args = prompts[own], completions[own], texts[own]
            return self._judge(*args).tolist()

        parts = processes.exchange_results(judge)
        return np.array([group for part in parts for group in part], "float32")

    def _judge(self, prompts, completions, texts):
        task, many = self.task, self.num_generations
        each = [p for p in prompts for _ in range(many)]
        columns = {
            name: [p.columns[name] for p in each]
            for name in prompts[0].columns
        }
        rewards, report = run_rewards(
            task.rewards,
            [p.prompt for p in each],
            [text for group in texts for text in group],
            columns,
            prompt_ids=[list(p.token_ids) for p in each],
            completion_ids=[
                list(c.token_ids) for group in completions for c in group
            ],
            rows=[p.row for p in each],
            timeout=task.reward_timeout,
            on_error=task.on_reward_error,
        )
        for name, entry in report.items():
            if entry["skipped"]:
                task.note_skipped_rewards(name, entry, self.step)
        return rewards.reshape(len(prompts), many, -1)


def zero_spread(group, weights):
    """Whether all completions of a group earn the same."""
    many = len(group.completions)
    total = advantage_lib.total_rewards(group.rewards, many, weights)
    return bool(advantage_lib.constant(total, 1)[0, 0])


def request_seed(seed, step, attempt=0):
    """The seed of a rollout's samples: of the run and the step alone."""
    key = np.random.SeedSequence([seed % 2**32, step, attempt])
    return int(key.generate_state(1)[0]) >> 1


def length_metrics(groups):
    """Lengths of completions, in tokens, under TRL's names."""
    completions = [c for g in groups for c in g.completions]
    lengths = np.array([len(c.token_ids) for c in completions])
    ended = np.array([c.finish_reason != "length" for c in completions])
    metrics = {"completions/clipped_ratio": float(1 - ended.mean())}
    for name, values in (
        ("length", lengths),
        ("terminated_length", lengths[ended]),
    ):
        for kind in ("mean", "min", "max"):
            # Nothing has ended: 0, as in TRL.
            value = getattr(values, kind)() if len(values) else 0.0
            metrics[f"completions/{kind}_{name}"] = float(value)
    return metrics
