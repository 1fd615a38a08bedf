"""Tunix: its agentic `GRPOLearner` on JAX, with its own sampler.

Each conversation is an episode with an environment that is the tool. Tunix
limits the tokens of an episode but not of a turn: here each call is limited.
Its sampler starts each call from the same seed, so the conversations of a
prompt are equal.
"""

import pathlib
import tempfile
import time

import agentic_steps
import jax
import numpy as np
import optax
import preset
import tunix_model
import workloads
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.parser.chat_template_parser import parser
from tunix.rl.rollout import base_rollout

WORK = workloads.AGENTIC
# Tokens of the first prompt with its template; later turns' are padded to a
# power of two, the last turn's to this one.
FIRST_PROMPT = WORK.prompt_words + 3
LONGEST_PROMPT = 256
# At least the tokens after the first prompt.
EPISODE = WORK.longest - WORK.prompt_words


class Agent(model_agent.ModelAgent):
    """An agent without the system message, which is empty."""

    def _init_messages(self, system_prompt):
        self._messages = []


class Environment(base_environment.BaseTaskEnv):
    """Replies to each turn but the last, after `tool_seconds`."""

    def __init__(self, task, *, tool_seconds, opened, closed, **kwargs):
        opened.append(time.perf_counter())
        super().__init__(task, max_steps=WORK.turns, **kwargs)
        self.tool_seconds, self.closed = tool_seconds, closed

    def _initial_observation(self):
        return self.task["prompts"].item()

    def _step_impl(self, action):
        said, turn = None, self.step_count
        if turn < WORK.turns:
            time.sleep(self.tool_seconds)
            said = WORK.words(WORK.said_words, turn)
        reward = float(self.extra_kwargs["pair_index"] % 2)
        return base_environment.EnvStepResult(
            said, reward, said is None, info={}
        )

    def close(self):
        self.closed.append(time.perf_counter())


def make_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        preset.write(WORK.model, pathlib.Path(folder), chat=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = None  # nothing is put before a prompt
    return tokenizer


def make_cluster(tokenizer, steps):
    """Makes a cluster in which one model with LoRA samples and trains."""
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    net = tunix_model.build(WORK.model)
    with mesh:
        actor = tunix_model.with_lora(net)
    role = rl_cluster.Role
    roles = (role.ACTOR, role.REFERENCE, role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(
                    workloads.LEARNING_RATE,
                    weight_decay=workloads.WEIGHT_DECAY,
                ),
                eval_every_n_steps=10**9,
                max_steps=steps,
                # Nothing else is computed until all conversations end.
                mini_batch_size=WORK.prompts,
                train_micro_batch_size=WORK.prompts,
                compute_logps_micro_batch_size=WORK.prompts,
            ),
            # The cache has the length that this work needs.
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=EPISODE,
                max_prompt_length=FIRST_PROMPT,
                kv_cache_size=LONGEST_PROMPT + WORK.tokens,
                temperature=1.0,
                top_p=1.0,
                eos_tokens=[-1],
                return_logprobs=True,
            ),
        ),
    )


def main():
    args = agentic_steps.arguments()
    steps = 1 + args.passes
    tokenizer = make_tokenizer()
    cluster = make_cluster(tokenizer, steps)
    generate = cluster.generate
    opened, closed, tokens = [], [], []

    def turn(*args, **kwargs):
        out = generate(
            *args, **{**kwargs, "max_generation_steps": WORK.tokens}
        )
        tokens.append(sum(map(len, out.tokens)))
        return out

    cluster.generate = turn
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=agentic_grpo_learner.GRPOConfig(
            num_generations=WORK.samples,
            num_iterations=1,
            beta=0.0,
            loss_agg_mode="token-mean",
            max_response_length=EPISODE,
            max_concurrency=WORK.conversations,
        ),
        chat_parser=parser.DefaultChatTemplateParser(tokenizer),
        agent_class=Agent,
        env_class=Environment,
        env_kwargs={
            "tool_seconds": args.tool_seconds,
            "opened": opened,
            "closed": closed,
        },
    )
    prompts = np.array(
        [
            WORK.words(WORK.prompt_words, 100 + i)
            for i in range(WORK.prompts * steps)
        ]
    )
    learner.train([{"prompts": part} for part in np.split(prompts, steps)])
    # One rollout after another.
    starts = np.reshape(opened, (steps, -1)).min(axis=1)
    ends = np.reshape(closed, (steps, -1)).max(axis=1)
    agentic_steps.emit(
        ("google-tunix", "flax", "jax", "transformers"),
        (ends - starts).tolist(),
        sum(tokens) / steps,
    )


if __name__ == "__main__":
    main()
