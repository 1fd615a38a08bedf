"""Samples completions and scores them."""

import dataclasses
import time

import numpy as np

from keras_posttrain import _console
from keras_posttrain._spans import span
from keras_posttrain.distribution import processes
from keras_posttrain.episodes.trajectory import of_completion
from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.rewards.reward import name as reward_name
from keras_posttrain.rewards.run import run_rewards
from keras_posttrain.rl.trajectory import Group
from keras_posttrain.rollout.request import Request


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling, the arguments of `kpt.GRPOTask.compile`."""

    num_generations: int = 1
    max_completion_length: int = 256
    temperature: float = 1.0
    stop_token_ids: tuple = ()
    num_minibatches: int = 1
    num_iterations: int = 1
    old_log_probs: str = "trainer"
    mask_truncated_completions: bool = False
    routing_replay: bool = False

    def fingerprint(self):
        """Returns the settings that must match for a run to be resumed."""
        stop = sorted(self.stop_token_ids)
        return dataclasses.asdict(self) | {"stop_token_ids": stop}


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """Settings of scoring, as passed to `kpt.GRPOTask.compile`.

    Attributes:
        rewards: tuple of reward functions; none if nothing is scored.
        weights: float array, one a function, or `None` for 1 each.
        advantages: function of rewards, or `None`.
        kl_in_reward: bool, whether `advantages` subtracts a KL divergence.
    """

    rewards: tuple = ()
    names: tuple = ()
    weights: np.ndarray | None = None
    advantages: object = None
    kl_in_reward: bool = False
    max_resamples: int = 0
    timeout: float | None = None
    on_error: str = "raise"

    def total(self, rewards, num_generations):
        """Weighted sums of rewards, `(prompts, num_generations)`."""
        return advantage_lib.total_rewards(
            rewards, num_generations, self.weights
        )

    def fingerprint(self):
        """Returns the settings that must match for a run to be resumed."""
        weights = None if self.weights is None else self.weights.tolist()
        is_value = dataclasses.is_dataclass(self.advantages)
        name = repr if is_value or self.advantages is None else reward_name
        return {
            "rewards": list(self.names),
            "reward_weights": weights,
            "advantages": name(self.advantages),
            "max_resamples": self.max_resamples,
        }


class Sampler:
    """Turns prompts into groups of scored trajectories.

    Without a `tokenizer` rewards receive ids. `generate` computes from a list
    of `Request`s the engine's completions, a list of lists; `seconds` is the
    time spent on sampling and on rewards.
    """

    def __init__(self, generate, sampling, scoring, tokenizer=None):
        self.generate, self.tokenizer = generate, tokenizer
        self.sampling, self.scoring = sampling, scoring
        self.seconds = {"time/rollout": 0.0, "time/reward": 0.0}

    def __call__(self, prompts, seed, step=0):
        """Returns a list of `Group`s, one a prompt."""
        return self.score(prompts, self.sample(prompts, seed), step)

    def sample(self, prompts, seed):
        """Returns a list with the completions of each prompt, a list."""
        sampling, start = self.sampling, time.perf_counter()
        requests = [
            Request(
                prompt.token_ids,
                num_generations=sampling.num_generations,
                max_tokens=sampling.max_completion_length,
                temperature=sampling.temperature,
                stop_token_ids=sampling.stop_token_ids,
                seed=seed,
                return_routed_experts=sampling.routing_replay,
                images=prompt.images,
            )
            for prompt in prompts
        ]
        with span("rollout"):
            completions = self.generate(requests)
        self.seconds["time/rollout"] += time.perf_counter() - start
        return completions

    def score(self, prompts, completions, step=0):
        """Scores what `sample` returned; returns one `Group` a prompt.

        Messages name the `step` of the run.
        """
        start = time.perf_counter()
        texts = [
            [self._text(prompt, c.token_ids) for c in group]
            for prompt, group in zip(prompts, completions)
        ]
        with span("reward"):
            rewards = self._rewards(prompts, completions, texts, step)
        self.seconds["time/reward"] += time.perf_counter() - start
        masked = self.sampling.mask_truncated_completions
        return [
            Group(
                p,
                [of_completion(p.token_ids, c, p.row, masked) for c in group],
                text,
                reward,
            )
            for p, group, text, reward in zip(
                prompts, completions, texts, rewards
            )
        ]

    def _text(self, prompt, ids):
        tokenizer = self.tokenizer
        text = list(ids) if tokenizer is None else tokenizer.decode(ids)
        if isinstance(prompt.prompt, str) or tokenizer is None:
            return text
        return [{"role": "assistant", "content": text}]

    def _rewards(self, prompts, completions, texts, step):
        """Returns rewards of all groups; each process scores its share."""
        if not self.scoring.rewards:
            shape = len(prompts), self.sampling.num_generations, 0
            return np.zeros(shape, np.float32)
        if processes.count() == 1:
            return self._run_rewards(prompts, completions, texts, step)
        own = processes.share(len(prompts))

        def score():
            if not prompts[own]:
                return []
            args = prompts[own], completions[own], texts[own]
            return self._run_rewards(*args, step).tolist()

        parts = processes.exchange_results(score)
        return np.array([group for part in parts for group in part], "float32")

    def _run_rewards(self, prompts, completions, texts, step):
        scoring, many = self.scoring, self.sampling.num_generations
        each = [p for p in prompts for _ in range(many)]
        columns = {
            name: [p.columns[name] for p in each]
            for name in prompts[0].columns
        }
        rewards, report = run_rewards(
            scoring.rewards,
            [p.prompt for p in each],
            [text for group in texts for text in group],
            columns,
            prompt_ids=[list(p.token_ids) for p in each],
            completion_ids=[
                list(c.token_ids) for group in completions for c in group
            ],
            rows=[p.row for p in each],
            timeout=scoring.timeout,
            on_error=scoring.on_error,
        )
        say_skipped(report, step)
        return rewards.reshape(len(prompts), many, -1)


def say_skipped(report, step):
    """Says which rewards of a batch were left out."""
    for name, entry in report.items():
        if entry["skipped"]:
            _console.say(
                f"Step {step + 1}: {entry['skipped']} rewards of {name!r} "
                f"were left out. {entry['error']}"
            )


def request_seed(seed, step, attempt=0):
    """Derives the seed of a rollout's samples from run and step alone."""
    key = np.random.SeedSequence([seed % 2**32, step, attempt])
    return int(key.generate_state(1)[0]) >> 1
