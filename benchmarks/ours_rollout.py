"""keras_posttrain: `NativeRollout`, from a Hugging Face directory.

With `--context` it measures how the cost of a decoding step grows: `--slots`
samples decode at once, each with that many tokens. With `--compiled` the
engine is used as `fit` uses it in a run of 200 rollouts and more: after its
second call it compiles the programs of all lengths.
"""

import pathlib
import tempfile

import keras_posttrain as kpt  # sets the backend

# isort: split
import generation
import numpy as np
import preset
import report
import workloads

from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.rollout import Expected

SAMPLES_A_PROMPT = 16  # largest number in the grid


def build(model, num_slots, length, compile_ahead=False):
    with tempfile.TemporaryDirectory() as folder:
        preset.write(model, pathlib.Path(folder))
        task = kpt.SFTTask.from_preset(folder, sequence_length=length)
    engine = NativeRollout(num_slots=num_slots, compile_ahead=compile_ahead)
    engine.set_model(task)
    return engine


def requests(prompts, samples, max_tokens, stop, temperature, seed):
    return [
        Request(
            token_ids=prompt,
            num_generations=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop,
            seed=seed,
        )
        for prompt in prompts
    ]


def measure_case(args):
    work = args.work
    length = work.longest_prompt + work.max_tokens
    ready_s, engine = generation.timed(
        build, work.model, args.slots, length, args.compiled
    )
    if args.compiled:
        lengths = [len(ids) for ids in work.prompt_ids()]
        samples = work.prompts * work.samples
        between = min(lengths), max(lengths)
        engine.expect(Expected(None, work.prompts, samples, between))

    def sample(*what):
        return [
            (c.token_ids, c.per_token_logps)
            for completions in engine.generate(requests(*what))
            for c in completions
        ]

    generation.measure(
        args,
        sample,
        ("keras", "keras-hub", "jax"),
        ready_s=ready_s,
        slots=args.slots,
        programs=lambda: [str(p) for p in engine.programs],
    )


def measure_cell(args):
    """Measures a cell of the grid: `GRID_STEPS` steps of all slots."""
    model = args.work.model
    ready_s, engine = generation.timed(build, model, args.slots, args.context)
    samples = min(args.slots, SAMPLES_A_PROMPT)
    new = 1 + workloads.GRID_STEPS
    prompts = np.random.default_rng(6).integers(
        workloads.FIRST,
        model.vocab,
        (args.slots // samples, args.context - new),
    )

    def call(seed, max_tokens):
        what = requests(prompts, samples, max_tokens, (), 1.0, seed)
        return generation.timed(engine.generate, what)[0]

    first_call_s = call(0, new)
    call(0, 1)
    pass_s, prefill_s = [], []
    for i in range(args.passes):
        pass_s.append(call(i, new))
        prefill_s.append(call(i, 1))
    prefill = float(np.median(prefill_s))
    decode = float(np.median(pass_s)) - prefill
    report.result(
        ("keras", "keras-hub", "jax"),
        tokens_per_s=args.slots * workloads.GRID_STEPS / decode,
        step_ms=1e3 * decode / workloads.GRID_STEPS,
        prefill_tokens_per_s=prompts.size / prefill,
        ready_s=ready_s,
        first_call_s=first_call_s,
        pass_s=pass_s,
        prefill_s=prefill_s,
        programs=[str(p) for p in engine.programs],
    )


def main():
    parser = generation.parser()
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--context", type=int)
    parser.add_argument("--compiled", action="store_true")
    args = generation.arguments(parser)
    if args.context:
        measure_cell(args)
    else:
        measure_case(args)


if __name__ == "__main__":
    main()
