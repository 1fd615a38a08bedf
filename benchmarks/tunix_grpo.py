"""Tunix: `GRPOLearner` on JAX, with its own sampler."""

import grpo_steps
import jax
import numpy as np
import optax
import tunix_model
import workloads
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


def make_cluster(args):
    """Makes a cluster in which one model with LoRA samples and trains."""
    work = args.work
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    net = tunix_model.build(work.model)
    with mesh:
        actor = tunix_model.with_lora(net)
    role = rl_cluster.Role
    roles = (role.ACTOR, role.REFERENCE, role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=tunix_model.IdTokenizer(),
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
                max_steps=args.steps,
            ),
            # The cache has the length that this work needs.
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=work.max_tokens,
                max_prompt_length=work.longest_prompt,
                kv_cache_size=work.longest_prompt + work.max_tokens,
                temperature=1.0,
                top_p=1.0,
                eos_tokens=[-1],
                return_logprobs=True,
            ),
        ),
    )


def watch(cluster, log):
    """Times the cluster's parts, and records its samples."""
    generate, update = cluster.generate, cluster.update_actor

    def counted(*args, **kwargs):
        out = generate(*args, **kwargs)
        sums = [np.sum(x, dtype="float64") for x in out.logprobs]
        log.logp_sums.append(float(sum(sums)))
        return out

    def updated(examples, *args, **kwargs):
        update(examples, *args, **kwargs)
        jax.block_until_ready(
            jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
        )

    timed_update = log.timed("train", updated)

    def trained(examples, *args, **kwargs):
        timed_update(examples, *args, **kwargs)
        masks = [np.asarray(e.completion_mask) for e in examples]
        log.trained.append(int(sum(m.sum() for m in masks)))
        log.step_ends()

    cluster.generate = log.timed("rollout", counted)
    cluster.update_actor = trained
    cluster.sync_weights = log.timed("sync", cluster.sync_weights)


def main():
    args = grpo_steps.arguments()
    work, log = args.work, grpo_steps.Log()
    cluster = make_cluster(args)

    def even_share(prompts, completions, **kwargs):
        return [
            log.reward([int(word) for word in text.split()])
            for text in completions
        ]

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=work.samples,
            num_iterations=1,
            beta=0.0,
            loss_agg_mode="token-mean",
        ),
        reward_fns=log.timed("reward", even_share),
    )
    watch(cluster, log)
    metrics = tunix_model.keep_metrics(cluster.actor_trainer)
    prompts = [" ".join(map(str, p)) for p in work.prompt_ids(args.steps)]
    log.start()
    learner.train(
        [
            {"prompts": np.array(prompts[i : i + work.prompts])}
            for i in range(0, len(prompts), work.prompts)
        ]
    )
    grpo_steps.emit(
        args,
        ("google-tunix", "flax", "jax", "optax", "qwix"),
        log,
        first_loss=metrics["loss"][0],
    )


if __name__ == "__main__":
    main()
