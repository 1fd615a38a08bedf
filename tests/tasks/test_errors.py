"""Bad input is refused by name, before anything is compiled."""

import json
import shutil

import grain
import keras
import keras_hub
import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, random_rows, weights

MODEL = REFERENCE / "models/qwen3"
ROWS = random_rows(4, seed=9)
LONG = {"token_ids": [5] * 65, "completion_mask": [1] * 65}


def make(**kwargs):
    kwargs = {"sequence_length": 64, **kwargs}
    return kpt.SFTTask.from_preset(MODEL, **kwargs)


@pytest.fixture(scope="module")
def task():
    """A task that no test here lets compile."""
    task = make(lora=kpt.LoRA(rank=2))
    task.compile()
    return task


@pytest.fixture(scope="module")
def full():
    return make()


def refused(function, *parts, error=ValueError):
    with pytest.raises(error) as caught:
        function()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def not_compiled(task):
    step = getattr(task, "compiled_train_step", None)
    return step is None or step._cache_size() == 0


# Making a task


@pytest.mark.parametrize(
    "name, value, parts",
    [
        ("lora", 16, ["must be a `kpt.LoRA`", "lora=16"]),
        ("lora", {"rank": 4}, ["kpt.LoRA(rank=16)", "lora={'rank': 4}"]),
        ("sequence_length", 1, ["at least 2", "sequence_length=1"]),
        ("sequence_length", "64", ["an int", "sequence_length='64'"]),
        ("sequence_length", 64.0, ["an int", "sequence_length=64.0"]),
        ("truncation", "left", ["'error', 'drop' or 'cut'", "='left'"]),
        ("truncation", True, ["'error', 'drop' or 'cut'", "truncation=True"]),
        ("remat", "half", ["'full' or 'auto'", "remat='half'"]),
        ("attention", "flash", ["'cudnn' or 'pallas'", "attention='flash'"]),
        ("reference", "qwen3", ["no reference model", "reference='qwen3'"]),
        ("train_on", "prompt", ["'completion', 'assistant'", "='prompt'"]),
    ],
)
def test_arguments_of_a_task(name, value, parts):
    refused(lambda: make(**{name: value}), f"{name}", *parts)


def test_a_length_beyond_the_models(tmp_path):
    limit = json.loads((MODEL / "config.json").read_text())
    limit = limit["max_position_embeddings"]
    refused(
        lambda: make(sequence_length=limit + 1),
        f"at most {limit}",
        "max_position_embeddings",
        f"sequence_length={limit + 1}",
    )
    assert make(sequence_length=limit).sequence_length == limit


@pytest.mark.parametrize("preset", ["no_such_preset", "no/such/directory"])
def test_an_unknown_preset(preset):
    refused(lambda: kpt.SFTTask.from_preset(preset), preset)


def test_a_directory_that_is_no_preset(tmp_path):
    (tmp_path / "file.txt").write_text("")
    message = refused(lambda: kpt.SFTTask.from_preset(tmp_path), str(tmp_path))
    assert "config.json" in message


def test_a_directory_without_weights(tmp_path):
    shutil.copy(MODEL / "config.json", tmp_path)
    refused(
        lambda: kpt.SFTTask.from_preset(tmp_path),
        "safetensors",
        str(tmp_path),
    )


def test_a_model_that_is_no_causal_lm():
    model = keras.Sequential([keras.layers.Dense(2)])
    refused(lambda: kpt.SFTTask(model), "`CausalLM`", "Sequential")


# LoRA


@pytest.mark.parametrize("rank", [0, -1, 2.0, "4", None])
def test_a_rank_is_a_positive_int(rank):
    refused(lambda: kpt.LoRA(rank=rank), "positive int", f"rank={rank!r}")


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2])
def test_dropout_is_a_probability(dropout):
    refused(lambda: kpt.LoRA(dropout=dropout), "[0, 1)", f"={dropout}")


def test_targets_that_match_nothing():
    refused(lambda: kpt.LoRA(targets="("), "regular expression", "'('")
    refused(
        lambda: make(lora=kpt.LoRA(targets="query")),
        "No linear layer matches",
        "self_attn.q_proj",
        "targets='query'",
    )


def test_an_adapter_of_another_rank(task):
    before = weights(task)
    path = REFERENCE / "adapters/qwen3_lora_r4_after"
    refused(
        lambda: task.load_adapter(path),
        str(path),
        "'rank': 4",
        "'rank': 2",
        "lora=kpt.LoRA(rank=4, alpha=8",
    )
    for name, value in before.items():
        np.testing.assert_array_equal(value, weights(task)[name])
    # What it says helps.
    make(lora=kpt.LoRA(rank=4, alpha=8)).load_adapter(path)


def test_an_adapter_of_another_model():
    path = REFERENCE / "adapters/gemma2_lora_r4_after"
    other = make(lora=kpt.LoRA(rank=4, alpha=8))
    refused(lambda: other.load_adapter(path), str(path), "also adapts")


def test_no_adapter_directory(task, tmp_path):
    refused(
        lambda: task.load_adapter(tmp_path),
        "adapter_config.json is missing",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    "method", ["save_adapter", "merge_adapter", "unmerge_adapter"]
)
def test_methods_that_need_an_adapter(full, method, tmp_path):
    arguments = (tmp_path,) if method == "save_adapter" else ()
    refused(
        lambda: getattr(full, method)(*arguments),
        f"`{method}` needs an adapter",
        "lora=kpt.LoRA(...)",
    )


def test_an_adapter_after_compile():
    task = make()
    task.compile()
    path = REFERENCE / "adapters/qwen3_lora_r4_after"
    refused(
        lambda: task.load_adapter(path),
        "compiled to train all weights",
        "before `compile`",
    )


def test_a_merged_adapter_is_not_trained():
    task = make(lora=kpt.LoRA(rank=2))
    task.compile()
    task.merge_adapter()
    refused(lambda: task.fit(ROWS, verbose=0), "`task.unmerge_adapter()`")
    refused(task.merge_adapter, "merged already", "unmerge_adapter()")
    assert not_compiled(task)
    task.unmerge_adapter()
    refused(task.unmerge_adapter, "not merged")
    task.fit(ROWS, verbose=0)
    assert task.step == 1


# compile


@pytest.mark.parametrize(
    "name, value, parts",
    [
        ("loss", "mse", ["'auto' or a loss object", "loss='mse'"]),
        (
            "loss",
            keras.losses.MeanSquaredError(),
            ["kpt.losses.SFTLoss()", "mean_squared_error"],
        ),
        ("loss", kpt.losses.SFTLoss, ["a loss object", "SFTLoss"]),
        ("micro_batch_size", 0, ["positive int", "micro_batch_size=0"]),
        ("micro_batch_size", 2.5, ["positive int", "micro_batch_size=2.5"]),
        ("micro_batch_size", True, ["positive int", "=True"]),
        ("max_grad_norm", 0, ["positive float", "None", "max_grad_norm=0"]),
        ("max_grad_norm", -1.0, ["positive float", "max_grad_norm=-1.0"]),
        ("max_grad_norm", "1", ["positive float", "max_grad_norm='1'"]),
        ("max_grad_norm", float("nan"), ["positive float", "=nan"]),
        ("optimizer", "adamm", ["'auto', a Keras optimizer", "'adamm'"]),
        ("optimizer", 1e-3, ["'auto', a Keras optimizer", "=0.001"]),
        (
            "optimizer",
            keras.optimizers.Adam(gradient_accumulation_steps=4),
            ["`micro_batch_size=`", "gradient_accumulation_steps=4"],
        ),
    ],
)
def test_arguments_of_compile(full, name, value, parts):
    refused(lambda: full.compile(**{name: value}), *parts)


def test_nothing_to_train():
    lm = make().causal_lm
    lm.trainable = False
    task = kpt.SFTTask(lm, sequence_length=64)
    refused(task.compile, "Nothing is trainable", "lora=kpt.LoRA(...)")


def test_compile_comes_first(full):
    for method in (full.fit, full.evaluate):
        refused(lambda method=method: method(ROWS), "compile()")


def test_an_optax_rate_is_its_own():
    task = make(lora=kpt.LoRA(rank=2))
    task.compile(optimizer=optax.adam(1e-3))
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 1e-4)
    refused(
        lambda: task.fit(ROWS, callbacks=[schedule], verbose=0),
        "optax.inject_hyperparams",
        "learning_rate=0.0001",
    )
    assert not_compiled(task)


# fit


@pytest.mark.parametrize("value", [0, -8, 2.5, "8", True, None])
@pytest.mark.parametrize("name", ["batch_size", "epochs"])
def test_counts_are_positive_ints(task, name, value):
    refused(
        lambda: task.fit(ROWS, **{name: value}),
        f"`{name}` must be a positive int",
        f"{name}={value!r}",
    )
    assert not_compiled(task)


def test_counts_may_be_numpys():
    task = make(lora=kpt.LoRA(rank=2))
    task.compile(micro_batch_size=np.int64(2))
    task.fit(ROWS, batch_size=np.int64(4), epochs=np.int32(1), verbose=0)
    assert task.step == 1


@pytest.mark.parametrize(
    "callback",
    [
        lambda path: keras.callbacks.ModelCheckpoint(path / "model.keras"),
        lambda path: keras.callbacks.BackupAndRestore(path / "backup"),
        lambda path: keras.callbacks.OrbaxCheckpoint(path / "orbax"),
    ],
    ids=["ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint"],
)
def test_kerass_checkpoints_are_refused(task, tmp_path, callback):
    callback = callback(tmp_path)
    refused(
        lambda: task.fit(ROWS, callbacks=[callback]),
        f"{type(callback).__name__} saves weights without",
        "`kpt.callbacks.Checkpoint(directory)`",
    )
    assert not_compiled(task)


def test_what_is_no_callback_is_refused(task):
    refused(
        lambda: task.fit(ROWS, callbacks=[print]),
        "`keras.callbacks.Callback`",
        "built-in function print",
    )
    refused(
        lambda: task.fit(ROWS, callbacks=[kpt.callbacks.Progress]),
        "`keras.callbacks.Callback`",
        "Progress",
    )


@pytest.mark.parametrize("method", ["load_weights", "save_weights"])
def test_kerass_weight_files_are_refused(task, method, tmp_path):
    refused(
        lambda: getattr(task, method)(tmp_path / "model.weights.h5"),
        f"has no `{method}`. It knows only whole models",
        "`save_adapter`/`load_adapter`",
        "`kpt.callbacks.Checkpoint(directory)`",
    )


def test_packing_needs_attention_that_keeps_sequences_apart():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=512,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=64,
    )
    lm = keras_hub.models.GPT2CausalLM(backbone)
    task = kpt.SFTTask(lm, sequence_length=64)
    task.compile()
    refused(
        lambda: task.fit(ROWS, packing=True),
        "GPT2Backbone has no attention that keeps packed sequences apart",
        "packing=False",
    )
    assert not_compiled(task)
    task.fit(ROWS, verbose=0)
    assert task.step == 1


# Data


PAIR = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
BAD_ROWS = {
    "empty": ([], ["at least one row", "0 rows"]),
    "a number": (3, ["must be a list of dicts", "=3", "type int"]),
    "one row": (PAIR, ["must be a list of dicts", "a dict"]),
    "no file": ("rows.jsonl", ["existing file", "rows.jsonl"]),
    "no dict": ([PAIR, [1, 2]], ["must be a dict", "row 1"]),
    "missing column": (
        [{"prompt_ids": [1]}],
        ["columns of one of", "row 0", "['prompt_ids']"],
    ),
    "misspelt column": (
        [PAIR, {"prompt_ids": [1], "completions_ids": [2]}],
        ["row 1", "completions_ids", "completion_ids"],
    ),
    "two types": ([PAIR, ROWS[0]], ["of one type", "row 1"]),
    "wrong type": (
        [PAIR, {"prompt_ids": "ab", "completion_ids": [1]}],
        ["'prompt_ids' must be a list of integers", "row 1", "'ab'"],
    ),
    "beyond the vocabulary": (
        [PAIR, {"prompt_ids": [1], "completion_ids": [9999]}],
        ["row 1", "token id 9999 at position 1", "vocabulary_size="],
    ),
    "negative": (
        [{"prompt_ids": [-1], "completion_ids": [2]}],
        ["row 0", "token id -1 at position 0"],
    ),
    "too long": (
        [PAIR, {"prompt_ids": [5], "completion_ids": [5] * 64}],
        ["row 1", "65 tokens", "sequence_length=64", "truncation='drop'"],
    ),
    "empty completion": (
        [PAIR, {"prompt_ids": [1], "completion_ids": []}],
        ["row 1", "none of which carries loss"],
    ),
    "no token with loss": (
        [{"token_ids": [1, 2, 3], "completion_mask": [1, 0, 0]}],
        ["row 0", "none of which carries loss", "truncation='drop'"],
    ),
    "NaN weight": (
        [PAIR | {"weight": float("nan")}],
        ["'weight' must be a finite number", "row 0", "weight=nan"],
    ),
    "NaN in the mask": (
        [{"token_ids": [1, 2], "completion_mask": [0, float("nan")]}],
        ["'completion_mask'", "row 0", "completion_mask[1]=nan"],
    ),
    "weights beyond float32": (
        [PAIR | {"weight": 1e300}],
        ["at most 1e6", "row 0", "weight=1e+300"],
    ),
    "a sum of weights beyond float32": (
        [{"token_ids": [1, 2], "completion_mask": [0, 3e38]}],
        ["'completion_mask'", "at most 1e6", "row 0"],
    ),
    "a misspelt weight": (
        [PAIR | {"wieght": 2.0}],
        ["Did you mean the column 'weight'?", "row 0", "'wieght'"],
    ),
    "negative weight": (
        [PAIR, PAIR | {"weight": -1}],
        ["at least 0", "row 1", "weight=-1"],
    ),
    "lengths that differ": (
        [{"token_ids": [1, 2], "completion_mask": [1]}],
        ["row 0", "2 token ids and 1 mask entries"],
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(task, name):
    rows, parts = BAD_ROWS[name]
    refused(lambda: task.fit(rows), "`dataset`", *parts)
    refused(lambda: task.evaluate(rows), *parts)
    refused(
        lambda: task.fit(ROWS, validation_data=rows),
        "`validation_data`",
        *parts,
    )
    assert not_compiled(task) and task.step == 0


def test_text_needs_a_tokenizer(full):
    task = kpt.SFTTask(full.causal_lm, sequence_length=64)
    task.compile()
    refused(lambda: task.fit([{"text": "a"}]), "need a tokenizer")
    refused(
        lambda: kpt.SFTTask(full.causal_lm, chat_template="{{ messages }}"),
        "`chat_template` needs a tokenizer",
        "`tokenizer=`",
    )


@pytest.mark.parametrize("steps", [(0,), (-1, 2)])
def test_steps_are_counted_from_1(task, steps):
    refused(lambda: task.fit(ROWS, skip_steps=steps), "from 1", "skip_steps=")


def test_all_rows_are_too_long(task):
    other = make(lora=kpt.LoRA(rank=2), truncation="drop")
    other.compile()
    refused(lambda: other.fit([LONG]), "No row of `dataset` is left", "1 drop")


# generate


def test_generate_refuses_half_a_character(task):
    message = [{"role": "user", "content": "a\ud83d"}]
    refused(lambda: task.generate("a\ud83d"), "prompt 0 with '\\ud83d'")
    refused(
        lambda: task.generate(["a", message]),
        "prompt 1, [0].content with '\\ud83d'",
        "at position 1",
    )


@pytest.mark.parametrize(
    "prompts, kwargs, parts",
    [
        ("a", {"max_tokens": 0}, ["positive int", "max_tokens=0"]),
        ("a", {"max_tokens": 2.0}, ["positive int", "max_tokens=2.0"]),
        ("a", {"temperature": -1}, ["0 (greedy)", "temperature=-1"]),
        ("a", {"top_k": 0}, ["positive int", "top_k=0"]),
        ("a", {"top_p": 0}, ["(0, 1]", "top_p=0"]),
        ("a", {"top_p": 1.5}, ["(0, 1]", "top_p=1.5"]),
        ("a", {"stop_token_ids": "eos"}, ["'auto', None or ints", "='eos'"]),
        (3, {}, ["`prompts` must be a str", "int"]),
        ({"ids": [1]}, {}, ["{'prompt_ids': [...]}", "['ids']"]),
        ({"prompt": "a"}, {}, ["pass row['prompt']"]),
        (
            {"prompt_ids": []},
            {},
            ["at least one", "prompt of request 0"],
        ),
        (
            [{"prompt_ids": [1]}, {"prompt_ids": [9999]}],
            {},
            ["id 9999", "place 0 of the prompt of request 1"],
        ),
        (
            {"prompt_ids": [1]},
            {"max_tokens": 10**6},
            ["context of", "1 token ids and max_tokens=1000000"],
        ),
    ],
)
def test_generate(task, prompts, kwargs, parts):
    refused(lambda: task.generate(prompts, **kwargs), *parts)


def test_generating_text_needs_a_tokenizer(full):
    task = kpt.SFTTask(full.causal_lm, sequence_length=64)
    prompt = {"prompt_ids": [5]}
    refused(lambda: task.generate("a"), "needs a tokenizer", "`tokenizer=`")
    refused(lambda: task.generate(prompt), "`generate` needs a tokenizer")
    refused(
        lambda: task.generate(prompt, return_token_ids=True),
        "`stop_token_ids='auto'` needs a tokenizer",
    )
    found = task.generate(
        prompt, return_token_ids=True, stop_token_ids=None, max_tokens=2
    )
    assert len(found) == 2


# After an error


def test_a_corrected_call_works(tmp_path):
    """All refusals in a row, then the same objects train as a fresh task."""
    fresh = make(lora=kpt.LoRA(rank=2))
    fresh.compile(optimizer=keras.optimizers.Adam(1e-2))
    fresh.fit(ROWS, batch_size=2, epochs=2, verbose=0)
    task = make(lora=kpt.LoRA(rank=2))
    refused(lambda: task.compile(loss="mse"), "mse")
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    log = kpt.callbacks.MetricsLog(tmp_path)
    for kwargs in (
        {"batch_size": 0},
        {"callbacks": [log, print]},
        {"validation_data": [LONG]},
        {"skip_steps": [0]},
    ):
        refused(lambda kwargs=kwargs: task.fit(ROWS, **kwargs))
    refused(lambda: task.fit([LONG]), "65")
    refused(lambda: task.compile(max_grad_norm=-1.0), "max_grad_norm")
    task.fit(ROWS, batch_size=2, epochs=2, verbose=0, callbacks=[log])
    assert task.step == 4
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    for (name, value), (_, other) in zip(
        sorted(weights(fresh).items()), sorted(weights(task).items())
    ):
        np.testing.assert_array_equal(value, other, name)


class Wrong(kpt.losses.TokenLoss):
    """A user's loss with a mistake that shows while it is traced."""

    def token_loss(self, logps):
        return -logps

    def total(self, batch, outputs):
        raise KeyError("a mistake in a loss")


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_an_error_in_a_step_costs_no_weights(method):
    task = make(lora=kpt.LoRA(rank=2))
    before = {v.path: np.array(v.value) for v in task.variables}
    task.compile(loss=Wrong())
    refused(
        lambda: getattr(task, method)(ROWS),
        "a mistake in a loss",
        error=KeyError,
    )
    assert task.step == 0
    for variable in task.variables:
        np.testing.assert_array_equal(before[variable.path], variable.value)
    task.compile(loss=kpt.losses.SFTLoss())
    task.fit(ROWS, verbose=0)
    assert task.step == 1


def test_a_loss_of_tokens_has_a_value_for_each(full):
    class Scalar(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            return -logps.mean()

    refused(lambda: full.compile(loss=Scalar()), "`token_loss` of Scalar",
            "its argument's shape", "(2, 3)")  # fmt: skip


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(-1e-3),
        keras.optimizers.AdamW(float("nan")),
        keras.optimizers.AdamW(float("inf")),
    ],
)
def test_learning_rates_are_finite_and_not_negative(full, optimizer):
    refused(lambda: full.compile(optimizer), "learning rate must be a finite",
            f"learning_rate={float(optimizer.learning_rate)}")  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "mixed_float16", "fp16", 16])
def test_dtypes_without_a_scaled_loss(dtype):
    refused(lambda: make(dtype=dtype), "`dtype` must be one of", "bfloat16",
            repr(dtype))  # fmt: skip


@pytest.mark.parametrize(
    "name, value",
    [
        ("seed", 2**40), ("seed", -1), ("seed", None), ("seed", 1.5),
        ("seed", True), ("shuffle", "yes"), ("shuffle", 1),
        ("verbose", "loud"), ("verbose", 7), ("skip_steps", [999]),
        ("skip_steps", [1.5]), ("skip_steps", 3), ("skip_steps", ["1"]),
    ],
)  # fmt: skip
def test_arguments_of_fit(task, name, value):
    refused(lambda: task.fit(ROWS, **{name: value}), f"`{name}` must")
    assert not_compiled(task)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8"])
def test_chunks_are_positive(value):
    refused(lambda: make(chunk_size=value), "`chunk_size` must be a positive",
            f"chunk_size={value!r}")  # fmt: skip


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_bad_row_of_a_stream_costs_no_weights(method, place):
    rows = random_rows(8, seed=9)
    rows[place] = {"token_ids": [1, 9999], "completion_mask": [0, 1]}
    stream = grain.MapDataset.source(rows).to_iter_dataset()
    task = make(lora=kpt.LoRA(rank=2))
    task.compile()
    options = {"shuffle": False} if method == "fit" else {}
    refused(
        lambda: getattr(task, method)(stream, batch_size=2, **options),
        f"row {place}",
        "9999",
    )
    assert all(np.isfinite(v.value).all() for v in task.variables)
    # What was trained before the bad row stays.
    assert task.step == (2 if place and method == "fit" else 0)
    task.fit(ROWS, verbose=0)
