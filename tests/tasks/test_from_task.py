"""Tasks that follow each other on one model; see `Task.from_task`."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    one_layer,
    random_rows,
    spread_adapter,
    weights,
)

ROWS = random_rows(6, seed=4)
PAIRS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, i]}
    for i in range(11, 15)
]
PRESET = one_layer(REFERENCE / "models/qwen3")


def make(lora=None, **kwargs):
    kwargs.setdefault("sequence_length", 64)
    task = kpt.SFTTask.from_preset(PRESET, lora=lora, **kwargs)
    task.compile(optimizer=keras.optimizers.AdamW(1e-2))
    return task


def adapted(**kwargs):
    task = make(kpt.LoRA(rank=4), **kwargs)
    spread_adapter(task)
    return task


def logps(task):
    return np.concatenate(task.log_probs(ROWS))


def reloaded(task, folder):
    """The log-probabilities of the files that a task writes, by kind."""
    task.export(folder / "export")
    task.save_to_preset(folder / "preset")
    found = {
        name: logps(kpt.SFTTask.from_preset(folder / name))
        for name in ("export", "preset")
    }
    if task.adapter:
        task.save_adapter(folder / "adapter")
        base = kpt.SFTTask.from_preset(PRESET)
        base.load_adapter(folder / "adapter")
        found["adapter"] = logps(base)
    return found


@pytest.mark.parametrize(
    "settings, count",
    [
        ({}, 56),
        # What "auto" stands for.
        pytest.param({"adapter": "continue"}, 56, marks=pytest.mark.full),
        ({"lora": kpt.LoRA(rank=2, targets="q_proj|v_proj")}, 16),
        ({"adapter": "merge", "lora": kpt.LoRA(rank=2, rslora=True)}, 56),
        ({"adapter": "merge"}, None),
    ],
    ids=["auto", "continue", "stack", "merge-lora", "merge-full"],
)
def test_the_next_task_saves_what_both_have_trained(settings, count, tmp_path):
    first = adapted()
    before = logps(first)
    task = kpt.DPOTask.from_task(first, **settings)
    np.testing.assert_allclose(logps(task), before, atol=2e-5)
    layers = len(task.causal_lm.backbone.transformer_layers)
    if count is not None:
        assert len(task.trainable_variables) == count * layers // 4
    task.compile(optimizer=keras.optimizers.AdamW(1e-3))
    task.fit(PAIRS, batch_size=2, verbose=0)
    now = logps(task)
    assert abs(now - before).max() > 1e-3
    if settings.get("adapter") == "merge" and task.adapter:
        # Its base is the merged model, which no file of its own holds.
        task.merge_adapter()
        np.testing.assert_allclose(logps(task), now, atol=2e-5)
        task.unmerge_adapter()
    found = reloaded(task, tmp_path)
    if settings.get("adapter") == "merge":
        found.pop("adapter", None)
    for name, values in found.items():
        np.testing.assert_allclose(values, now, atol=2e-5, err_msg=name)


def test_a_stacked_adapter_trains_alone_and_samples_with_both():
    """The reference is the model with the earlier adapter."""
    first = adapted()
    lower = [np.array(v) for v in first.adapter.b]
    task = kpt.DPOTask.from_task(first, lora=kpt.LoRA(rank=2))
    task.compile(optimizer=keras.optimizers.AdamW(1e-2))
    task.fit(PAIRS, batch_size=4, verbose=0)
    # Log 2 on the first step: the policy is the reference.
    np.testing.assert_allclose(task.step_logs["loss"], np.log(2), rtol=1e-6)
    for old, new in zip(lower, first.adapter.b):
        np.testing.assert_array_equal(old, new)
    for merged in (True, False):
        engine = kpt.rollout.NativeRollout(merge_adapter=merged)
        engine.set_model(task)
        request = kpt.rollout.Request((5, 6, 7), max_tokens=6, seed=1)
        engine.start()
        ((sample,),) = engine.generate([request])
        engine.stop()
        ids = [5, 6, 7, *sample.token_ids]
        row = {"token_ids": ids, "completion_mask": [1] * len(ids)}
        np.testing.assert_allclose(
            sample.per_token_logps, task.log_probs([row])[0][3:], atol=2e-5
        )


def test_the_settings_are_those_of_the_earlier_task():
    first = adapted(truncation="cut", remat="full", chunk_size=64)
    task = kpt.DPOTask.from_task(first, sequence_length=32)
    assert task.tokenizer is first.tokenizer
    assert task.causal_lm is first.causal_lm
    assert task.preset == first.preset
    assert (task.truncation, task.sequence_length) == ("cut", 32)
    assert (task.policy.remat, task.policy.chunk_size) == ("full", 64)


def test_full_training_goes_on_with_full_training():
    first = make()
    task = kpt.SFTTask.from_task(first)
    task.compile(optimizer=keras.optimizers.AdamW(1e-3))
    task.fit(ROWS, batch_size=6, verbose=0)
    np.testing.assert_array_equal(logps(first), logps(task))
    first.fit(ROWS, batch_size=6, verbose=0)
    np.testing.assert_array_equal(logps(first), logps(task))


USES = {
    "fit": lambda task, folder: task.fit(ROWS),
    "evaluate": lambda task, folder: task.evaluate(ROWS),
    "log_probs": lambda task, folder: task.log_probs(ROWS),
    "generate": lambda task, folder: task.generate({"prompt_ids": [5]}),
    "export": lambda task, folder: task.export(folder / "new"),
    "save_to_preset": lambda task, folder: task.save_to_preset(folder / "new"),
    "from_task": lambda task, folder: kpt.SFTTask.from_task(task),
    "save_adapter": lambda task, folder: task.save_adapter(folder / "new"),
    "merge_adapter": lambda task, folder: task.merge_adapter(),
    "unmerge_adapter": lambda task, folder: task.unmerge_adapter(),
}


@pytest.mark.parametrize("how", ["stack", "merge", "full"])
def test_an_earlier_task_refuses_to_be_used(how, tmp_path):
    """Its results would lack what was trained since."""
    first = make() if how == "full" else adapted()
    if how == "merge":
        # Merged, and unmerged behind the back of the next task.
        first.merge_adapter()
    kwargs = {} if how == "full" else {"adapter": how}
    kpt.SFTTask.from_task(first, lora=kpt.LoRA(rank=2), **kwargs)
    before = weights(first)
    for name, use in USES.items():
        if how == "full" and name.endswith("_adapter"):
            continue
        with pytest.raises(ValueError, match="Another task was made on this"):
            use(first, tmp_path)
    assert not (tmp_path / "new").exists()
    for path, value in weights(first).items():
        np.testing.assert_array_equal(value, before[path])


@pytest.mark.parametrize("lora", [None, kpt.LoRA(rank=2)])
def test_a_model_with_an_adapter_needs_from_task(lora):
    first = adapted()
    before = logps(first)
    with pytest.raises(ValueError, match="adapter of another.*from_task"):
        kpt.DPOTask(first.causal_lm, first.tokenizer, lora=lora)
    first.fit(ROWS, batch_size=6, verbose=0)
    assert abs(logps(first) - before).max() > 1e-3


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"adapter": "keep"}, "must be 'auto', 'continue', 'merge' or 'stack"),
        (
            {"adapter": "continue", "lora": kpt.LoRA()},
            "keeps its settings.*adapter='stack' or 'merge'",
        ),
        ({"adapter": "stack"}, r"Pass `lora=kpt.LoRA\(...\)`"),
        ({"lora": 8}, "must be a `kpt.LoRA`"),
    ],
)
def test_errors(settings, message):
    first = adapted()
    with pytest.raises(ValueError, match=message):
        kpt.DPOTask.from_task(first, **settings)
    first.fit(ROWS, batch_size=6, verbose=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": kpt.LoRA(rank=2)}, {"adapter": "merge"}],
    ids=["continue", "stack", "merge"],
)
def test_a_constructor_that_raises_changes_nothing(settings):
    first = adapted()
    before = logps(first)
    with pytest.raises(ValueError, match="teacher_length"):
        kpt.DistillTask.from_task(first, teacher_length=-1, **settings)
    np.testing.assert_array_equal(logps(first), before)
    np.testing.assert_array_equal(logps(kpt.DPOTask.from_task(first)), before)


def test_the_adapter_of_a_task_that_was_never_made_is_removed():
    model = make().causal_lm
    with pytest.raises(ValueError, match="teacher_length"):
        kpt.DistillTask(model, lora=kpt.LoRA(), teacher_length=-1)
    task = kpt.SFTTask(model, sequence_length=64)
    task.compile()
    task.fit(ROWS, batch_size=6, verbose=0)


def test_a_merged_adapter_is_not_continued():
    first = adapted()
    first.merge_adapter()
    for settings in ({}, {"lora": kpt.LoRA()}):
        with pytest.raises(ValueError, match="merged into the weights"):
            kpt.DPOTask.from_task(first, **settings)
    now = logps(first)
    task = kpt.DPOTask.from_task(first, adapter="merge")
    np.testing.assert_array_equal(logps(task), now)


def test_a_teacher_counts_its_adapter(tmp_path):
    """A cache of a teacher's answers knows the teacher's adapter."""
    teacher = adapted()

    def fit():
        task = kpt.DistillTask.from_preset(
            PRESET, teacher=teacher.causal_lm, sequence_length=64
        )
        task.compile(top_k=4, teacher_cache=tmp_path / "cache")
        task.fit(ROWS, batch_size=6, verbose=0)
        return task

    fit()
    teacher.adapter.b[0].assign(teacher.adapter.b[0] + 0.1)
    with pytest.raises(ValueError, match="weights"):
        fit()
