"""KerasHub: `CausalLM.generate` on JAX, which returns no log-probs.

All rows step together from the end of the shortest prompt. Therefore a batch
is as wide as the longest prompt with its new tokens, and each row is cut here.
"""

import generation
import keras_hub_model  # sets the backend

# isort: split
import keras_hub
import numpy as np
import workloads


def main():
    args = generation.arguments()
    ready_s, lm = generation.timed(keras_hub_model.build, args.work.model)
    samplers = {
        0.0: keras_hub.samplers.GreedySampler(),
        1.0: keras_hub.samplers.RandomSampler(temperature=1.0, seed=0),
    }
    compiled = None

    def sample(prompts, samples, max_tokens, stop, temperature, seed):
        # Its random state advances with each call and takes no `seed`.
        nonlocal compiled
        if temperature != compiled:
            lm.compile(sampler=samplers[temperature])
            compiled = temperature
        prompts = [p for p in prompts for _ in range(samples)]
        width = max(map(len, prompts)) + max_tokens
        ids = np.full((len(prompts), width), workloads.PAD, np.int32)
        mask = np.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = prompt
            mask[i, : len(prompt)] = 1
        out = lm.generate(
            {"token_ids": ids, "padding_mask": mask},
            stop_token_ids=tuple(stop) or None,
        )
        tokens = np.asarray(out["token_ids"])
        stop = set(stop)
        return [
            (generation.cut(row[len(p) : len(p) + max_tokens], stop), None)
            for p, row in zip(prompts, tokens.tolist(), strict=True)
        ]

    generation.measure(
        args,
        sample,
        ("keras", "keras-hub", "jax"),
        ready_s=ready_s,
        prefill=False,  # longer prompts are processed token by token
    )


if __name__ == "__main__":
    main()
