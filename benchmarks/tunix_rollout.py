"""Tunix: its `Sampler` on JAX, with log-probs."""

import generation
import tunix_model
from tunix.generate import sampler


def build(work):
    """Makes the engine with the cache length that this work needs."""
    model = work.model
    return sampler.Sampler(
        tunix_model.build(model),
        tunix_model.IdTokenizer(),
        sampler.CacheConfig(
            cache_size=work.longest_prompt + work.max_tokens,
            num_layers=model.layers,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
        ),
    )


def main():
    args = generation.arguments()
    width = args.work.longest_prompt
    ready_s, engine = generation.timed(build, args.work)

    def sample(prompts, samples, max_tokens, stop, temperature, seed):
        texts = [
            " ".join(map(str, p)) for p in prompts for _ in range(samples)
        ]
        out = engine(
            texts,
            max_generation_steps=max_tokens,
            max_prompt_length=width,
            eos_tokens=stop or [-1],
            temperature=temperature,
            top_p=1.0
            if temperature
            else None,  # sampling is greedy without it
            seed=seed,
            return_logprobs=True,
        )
        rows = []
        for ids, logps in zip(out.tokens, out.logprobs, strict=True):
            ids = [int(i) for i in ids]
            if stop:
                # The stop token was sampled too, but the sampler leaves it and
                # its log-prob out.
                ids = ids if len(ids) == max_tokens else [*ids, stop[0]]
                logps = None
            rows.append((ids, logps))
        return rows

    generation.measure(
        args, sample, ("google-tunix", "flax", "jax"), ready_s=ready_s
    )


if __name__ == "__main__":
    main()
