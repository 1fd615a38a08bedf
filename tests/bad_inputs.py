"""Bad inputs: by id, the call, the error's type, words of its message.

A call takes a namespace of tasks; see `test_bad_inputs.py`.
"""

import keras

import keras_posttrain as kpt

ROW = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
ROWS = [ROW, ROW]
PAIR = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
NAN = float("nan")


def reward(completions, **columns):
    return [0.0] * len(completions)


BAD = {}


def each(place, call, name, values, *words):
    for value in values:
        BAD[f"{place}-{name}-{value!r}"] = (
            lambda t, value=value: call(t, **{name: value}),
            ValueError,
            (name, *words),
        )


def sft_make(t, **kwargs):
    kpt.SFTTask(t.model, **kwargs)


def sft_fit(t, dataset=ROWS, **kwargs):
    t.sft.fit(dataset, **kwargs)


def sft_compile(t, **kwargs):
    t.sft.compile(**kwargs)


def dpo_fit(t, **kwargs):
    t.dpo.fit([PAIR, PAIR], **kwargs)


def grpo_compile(t, **kwargs):
    t.grpo.compile(
        **{"rewards": [reward], "max_completion_length": 8, **kwargs}
    )


def generate(t, **kwargs):
    t.sft.generate({"prompt_ids": [5]}, **kwargs)


def score_rows(t, **kwargs):
    t.sft.log_probs(ROWS, **kwargs)


COUNTS = [0, -1, 2.5, "8", True]
for call, name in [
    (sft_fit, "batch_size"),
    (sft_fit, "epochs"),
    (dpo_fit, "batch_size"),
    (dpo_fit, "epochs"),
    (sft_compile, "micro_batch_size"),
    (grpo_compile, "num_generations"),
    (grpo_compile, "max_completion_length"),
    (grpo_compile, "num_minibatches"),
    (grpo_compile, "num_iterations"),
    (generate, "max_tokens"),
    (generate, "num_generations"),
    (generate, "top_k"),
    (score_rows, "batch_size"),
]:
    each(call.__name__, call, name, COUNTS)
each("make", sft_make, "sequence_length", [0, 1, -5, 2.5, "64", None])
each("make", sft_make, "lora", [16, "lora", {"rank": 4}])
each("make", sft_make, "truncation", ["left", True, None])
each("make", sft_make, "remat", ["half", True, None])
each("make", sft_make, "chunk_size", COUNTS)
each("make", sft_make, "train_on", ["prompt", None, 3])
each("make", sft_make, "tokenizer", [3, object, "no/such"])
each("sft_fit", sft_fit, "seed", [2**40, None, -1, 1.5, "0"])
each("sft_fit", sft_fit, "shuffle", ["yes", 1, None])
each("sft_fit", sft_fit, "verbose", ["loud", 7])
each("sft_fit", sft_fit, "epochs", [None])
each("sft_fit", sft_fit, "skip_steps", [[0], 3, ["a"]])
each("sft_fit", sft_fit, "callbacks", [[print], 3])
each("sft_fit", sft_fit, "dataset", [[], 3, None, "no.jsonl"])
each("dpo_fit", dpo_fit, "share_prefix", ["yes", 1])
each("sft_compile", sft_compile, "loss", ["mse", 3])
each("sft_compile", sft_compile, "loss", [keras.losses.MeanSquaredError])
each("sft_compile", sft_compile, "max_grad_norm", [0, -1.0, "1", NAN])
each("sft_compile", sft_compile, "optimizer", ["adamm", 3])
each("grpo_compile", grpo_compile, "rewards", [[], 3, [3], None])
each("grpo_compile", grpo_compile, "temperature", [-1.0, "a", NAN])
each("grpo_compile", grpo_compile, "reward_timeout", [0, -1, "a"])
each("grpo_compile", grpo_compile, "on_reward_error", ["stop", 3])
each("grpo_compile", grpo_compile, "max_resamples", [-1, 1.5])
each("grpo_compile", grpo_compile, "old_log_probs", ["none", 3])
each("grpo_compile", grpo_compile, "rollout", ["vllm", 3])
each("generate", generate, "temperature", [-1, "a", NAN])
each("generate", generate, "top_p", [0, 1.5, "a"])
each("generate", generate, "min_p", [-1, 2, "a"])
each("generate", generate, "seed", [2**40, -1, 1.5])
each("generate", generate, "stop_token_ids", ["eos", [-1], [1.5]])

# Not answered well yet: these fail, and a mend has to take them out of here.
OPEN = {
    *(n for n in BAD if n.startswith("make-tokenizer-")),
    *(n for n in BAD if n.startswith("grpo_compile-reward_timeout-")),
    *(n for n in BAD if n.startswith("grpo_compile-on_reward_error-")),
    "grpo_compile-rewards-[3]",
    "generate-stop_token_ids-[1.5]",
}
