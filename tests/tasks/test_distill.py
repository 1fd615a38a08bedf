"""`DistillTask`: the numbers, the teacher, samples, resume, errors."""

import jax
import keras
import numpy as np
import pytest
import safetensors.numpy

import keras_posttrain as kpt
from keras_posttrain.models.activation_capture import ActivationCapture
from tests.support import (
    FAMILIES,
    REFERENCE,
    load_json,
    lowered,
    one_layer,
    random_rows,
    read_log,
    weights,
)

losses = kpt.losses
MODELS = REFERENCE / "models"
MODEL, OTHER, THIRD, GEMMA = (
    one_layer(MODELS / x)
    for x in ("llama3", "llama3_ref", "llama3_eps1e5", "gemma2")
)
ROWS = random_rows(6)
PAIRS = [
    {"prompt_ids": r["token_ids"][:6], "completion_ids": r["token_ids"][6:]}
    for r in ROWS
]
PROMPTS = [{"prompt_ids": r["prompt_ids"]} for r in PAIRS]
CONTEXT = [
    {**r, "teacher_prompt_ids": [5, 6, 7] + r["prompt_ids"]} for r in PAIRS
]


def make(model=MODEL, teacher=OTHER, **kwargs):
    return kpt.DistillTask.from_preset(
        model, teacher=teacher, sequence_length=64, **kwargs
    )


def compiled(task, loss="auto", **kwargs):
    kwargs = {
        "optimizer": keras.optimizers.SGD(1.0),
        "max_grad_norm": None,
        **kwargs,
    }
    task.compile(loss=loss, **kwargs)
    return task


def step(task, rows, **kwargs):
    """Returns what one SGD step on all rows reports and changes."""
    before = weights(task)
    history = task.fit(
        rows, batch_size=len(rows), shuffle=False, verbose=0, **kwargs
    ).history
    after = weights(task)
    return history, {k: after[k] - before[k] for k in after}


# --- The numbers -------------------------------------------------------------


@pytest.mark.parametrize(
    "case", load_json("distill.json")["model_cases"], ids=lambda c: c["name"]
)
def test_loss_and_gradient_of_reference(case):
    inputs, settings = case["inputs"], case["settings"]
    rows = [
        {"prompt_ids": ids[:n], "completion_ids": ids[n:]}
        for ids, n in zip(inputs["token_ids"], inputs["prompt_lengths"])
    ]
    task = make(
        REFERENCE / inputs["student"],
        REFERENCE / inputs["teacher"],
    )
    loss = losses.JSDLoss(
        beta=settings["beta"],
        temperature=settings["temperature"],
        squared_temperature=False,
        kl_at_ends=True,
    )
    history, _ = step(compiled(task, loss), rows)
    expected = case["expected"]
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        history["grad_norm"], expected["grad_norm"], rtol=1e-5
    )


# The head of the others is one of these: tied or not, with a cap or without.
CAPPED_TIED_UNTIED = ("gemma2", "qwen3", "llama")


@pytest.mark.parametrize(
    "family",
    [
        x
        if x in CAPPED_TIED_UNTIED
        else pytest.param(x, marks=pytest.mark.full)
        for x in FAMILIES
    ],
)
def test_every_family_is_compared_token_by_token(family):
    path = one_layer(MODELS / FAMILIES[family])
    student = make(path, None)
    size = student.causal_lm.backbone.vocabulary_size
    teacher = kpt.SFTTask.from_preset(path, sequence_length=64)
    rng = np.random.default_rng(0)
    for v in teacher.causal_lm.variables:
        v.assign(v + rng.normal(0, 0.02, v.shape).astype("float32"))
    task = kpt.DistillTask(
        student.causal_lm, teacher=teacher.causal_lm, sequence_length=64
    )
    compiled(task, losses.ForwardKLLoss(temperature=2.0))
    rows = random_rows(3, vocabulary=min(size, 500))
    found = task.evaluate(rows, batch_size=3)
    total, agrees, count = 0.0, 0.0, 0
    for row in rows:
        ids = np.array([row["token_ids"]])
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        predicted = np.array(row["completion_mask"])[1:] > 0
        ours, theirs = (
            np.asarray(model(inputs))[0, :-1][predicted]
            for model in (student.causal_lm, teacher.causal_lm)
        )
        agrees += (ours.argmax(-1) == theirs.argmax(-1)).sum()
        ours, theirs = (jax.nn.log_softmax(x / 2.0) for x in (ours, theirs))
        total += (np.exp(theirs) * (theirs - ours)).sum()
        count += predicted.sum()
    np.testing.assert_allclose(found["loss"], 4 * total / count, rtol=2e-4)
    np.testing.assert_allclose(found["divergence"], total / count, rtol=2e-4)
    np.testing.assert_allclose(found["agreement"], agrees / count, rtol=1e-5)


def test_equal_models_have_nothing_to_learn():
    task = compiled(make(teacher=MODEL))
    history, update = step(task, ROWS)
    assert abs(history["loss"][0]) < 1e-6
    assert history["agreement"] == [1.0]
    assert max(np.abs(x).max() for x in update.values()) < 1e-6


# --- The teacher -------------------------------------------------------------


def same(first, second, atol=2e-5):
    (history, update), (other_history, other) = first, second
    for key, values in history.items():
        if key != "num_tokens" and not key.startswith("time/"):
            np.testing.assert_allclose(
                other_history[key], values, rtol=2e-5, atol=1e-6, err_msg=key
            )
    size = max(np.abs(x).max() for x in update.values())
    assert size > 1e-5
    for key, value in update.items():
        np.testing.assert_allclose(
            other[key], value, rtol=0, atol=atol * size, err_msg=key
        )


def test_a_teacher_of_each_row_is_the_only_one():
    task = make(teacher=[OTHER, None])
    alone = [compiled(make(teacher=t), losses.JSDLoss()) for t in
             (OTHER, None)]  # fmt: skip
    first, second = (t.evaluate(ROWS, 6)["loss"] for t in alone)
    compiled(task, losses.JSDLoss(), teacher_weights={"0": 0.25, "1": 3.0})
    both = task.evaluate(ROWS, 6)["loss"]
    np.testing.assert_allclose(both, 0.25 * first + 3.0 * second, rtol=1e-5)


def test_the_teacher_stays_as_it_is_and_out_of_the_run(tmp_path):
    teacher = kpt.SFTTask.from_preset(
        MODELS / "llama3_ref", sequence_length=64
    ).causal_lm
    before = [np.array(v.value) for v in teacher.variables]
    task = compiled(make(MODELS / "llama3", teacher), losses.HiddenStateLoss())
    assert len(task.feature_maps) == 1
    owned = {id(v) for v in task.variables}
    assert not owned & {id(v) for v in teacher.variables}
    step(task, ROWS)
    for v, b in zip(teacher.variables, before, strict=True):
        np.testing.assert_array_equal(v.value, b)
    arrays, _ = task.run.training_state()
    assert arrays["teacher_0"] == {}
    # What was learned to compare is kept with the run, and not exported.
    maps = [v for v in task.trainable_variables if "feature_map" in v.path]
    assert len(maps) == 2
    task.export(tmp_path)
    names = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    plain = kpt.SFTTask.from_preset(MODELS / "llama3", sequence_length=64)
    plain.export(tmp_path / "plain")
    assert set(names) == set(
        safetensors.numpy.load_file(tmp_path / "plain/model.safetensors")
    )


def test_hidden_states_are_compared_at_the_same_tokens():
    """Where the teacher has a longer prompt, its tokens come later."""
    student, teacher = (
        kpt.SFTTask.from_preset(path, sequence_length=64)
        for path in (MODEL, OTHER)
    )

    def states(task, ids):
        capture = ActivationCapture(hidden_layers=(0,))
        batch = {
            "token_ids": np.array([ids]),
            "segment_ids": np.ones((1, len(ids)), "int32"),
            "positions": np.arange(len(ids))[None],
        }
        task.policy.hidden_states(batch, capture=capture)
        return np.asarray(capture.hidden[0])[0]

    total = count = 0
    for row in CONTEXT:
        new, n = row["completion_ids"], len(row["completion_ids"])
        ours = states(student, row["prompt_ids"] + new)[-n:]
        theirs = states(teacher, row["teacher_prompt_ids"] + new)[-n:]
        total += np.square(ours - theirs).mean(axis=-1).sum()
        count += n
    found = []
    for packing in (False, True):
        task = compiled(make(), losses.HiddenStateLoss(matching="none"))
        found.append(step(task, CONTEXT, packing=packing))
        np.testing.assert_allclose(
            found[-1][0]["loss"], total / count, rtol=1e-5
        )
    same(*found)


def test_the_student_as_it_was_teaches():
    task = compiled(make(teacher=None, lora=kpt.LoRA(rank=4)))
    first = task.evaluate(CONTEXT, 6)
    assert first["loss"] > 1e-3
    history, _ = step(task, CONTEXT)
    np.testing.assert_allclose(history["loss"], first["loss"], rtol=1e-5)
    assert task.teachers[0].kind == "off" and not task.teachers[0].values
    full = compiled(make(teacher=None), optimizer=keras.optimizers.SGD(0.05))
    history, _ = step(full, CONTEXT)
    np.testing.assert_allclose(history["loss"], first["loss"], rtol=1e-5)
    assert full.teachers[0].kind == "copy"
    assert full.evaluate(CONTEXT, 6)["loss"] < first["loss"]


def test_a_teacher_with_other_tokens():
    rows = [
        {"prompt": "What is 2 + 2? ", "completion": "It is four, I think."},
        {"prompt": "hello ", "completion": "good morning to you \u00e9"},
    ]
    loss = losses.ULDLoss(alpha=0.5)
    found = []
    for packing in (False, True):
        task = compiled(make(teacher=GEMMA), loss)
        found.append(step(task, rows, packing=packing))
        assert 0.5 < task.data_report.predicted_share < 1
    assert "agreement" not in found[0][0]
    same(*found)
    # Of one size, and not the same tokens.
    with pytest.raises(ValueError, match="other ids.*ULDLoss"):
        compiled(task)
    with pytest.raises(ValueError, match="needs rows of text"):
        task.fit(PAIRS, verbose=0)
    with pytest.raises(ValueError, match="HiddenStateLoss compares"):
        compiled(task, losses.SumLoss([loss, losses.HiddenStateLoss()]))


# --- What is written down ----------------------------------------------------


def test_the_rest_of_a_distribution_is_one_outcome(tmp_path):
    task = compiled(make(), teacher_cache=tmp_path, top_k=8)
    held_out = random_rows(4, seed=1)
    history, _ = step(task, ROWS, validation_data=held_out)
    assert task.cached.computed == 10 and task.teachers == ()
    whole, _ = step(compiled(make()), ROWS)
    # Outcomes taken together are nearer to each other.
    assert 0 < history["loss"][0] < whole["loss"][0]
    again = compiled(make(), teacher_cache=tmp_path, top_k=8)
    assert step(again, ROWS)[0]["loss"] == history["loss"]
    assert again.cached.computed == 0
    for changed in (
        {"teacher": THIRD},
        {"top_k": 4},
        {"loss": losses.ForwardKLLoss(temperature=3.0)},
    ):
        other = make(teacher=changed.pop("teacher", OTHER))
        compiled(other, teacher_cache=tmp_path, **{"top_k": 8, **changed})
        with pytest.raises(ValueError, match="another directory"):
            other.fit(ROWS, verbose=0)


def test_the_student_when_training_began_is_that_of_fit(tmp_path):
    task = compiled(make(teacher=None), teacher_cache=tmp_path, top_k=8)
    assert task.evaluate(CONTEXT, 6)["loss"] > 0
    first = task.trainable_variables[0]
    first.assign(first * 2.0)
    # What was kept is of the student as it was then.
    with pytest.raises(ValueError, match="another directory"):
        task.fit(CONTEXT, verbose=0)
    first.assign(first / 2.0)
    task.fit(CONTEXT[:4], batch_size=4, verbose=0)
    assert task.cached.computed == 0
    with pytest.raises(ValueError, match="no longer there to be asked"):
        task.evaluate([{**CONTEXT[0], "completion_ids": [9, 8]}], batch_size=1)


# --- The student's own samples -----------------------------------------------

SAMPLING = {
    "on_policy": True,
    "max_completion_length": 8,
    "num_generations": 2,
}


def sampled(loss="auto", teacher=OTHER, rows=PROMPTS,
            fit=None, **kwargs):  # fmt: skip
    task = make(teacher=teacher)
    compiled(task, loss, **SAMPLING | kwargs)
    return task, *step(task, rows, **fit or {})


def test_the_policy_gradient_goes_by_the_teachers_log_probs():
    class Keep(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            run = self.model.run
            collect = run.collect

            def kept(rollout):
                self.batches = collect(rollout)
                return self.batches

            run.collect = kept

    student, teacher = (
        kpt.SFTTask.from_preset(path, sequence_length=64)
        for path in (MODEL, OTHER)
    )
    for rows, context in ((PROMPTS, []), (CONTEXT, [5, 6, 7])):
        rows = [{k: v for k, v in r.items() if "completion" not in k}
                for r in rows]  # fmt: skip
        keep = Keep()
        sampled(losses.ReinforceLoss(), rows=rows, fit={"callbacks": [keep]})
        (batch,) = keep.batches
        for r in range(len(batch["token_ids"])):
            mask = batch["completion_mask"][r] > 0
            n = int((batch["segment_ids"][r] > 0).sum())
            ids = batch["token_ids"][r, :n].tolist()
            own = student.log_probs([_whole(ids)])[0]
            his = teacher.log_probs([_whole(context + ids)])[0]
            gap = his[len(context) :] - own
            np.testing.assert_allclose(
                batch["advantages"][r, :n][mask[:n]],
                gap[mask[:n]],
                atol=5e-5,
            )
            assert not batch["advantages"][r][~mask].any()


def _whole(ids):
    return {"token_ids": ids, "completion_mask": [1] * len(ids)}


def test_a_share_of_rows_is_sampled():
    task = make()
    compiled(task, on_policy=0.5, max_completion_length=8)
    history, _ = step(task, PAIRS)
    task.fit(PAIRS, batch_size=6, verbose=0)
    table = task.last_rollout
    assert len(table["completion"]) == 3
    given = compiled(make())
    assert history["loss"] != step(given, PAIRS)[0]["loss"]


def test_a_served_teacher_says_the_same():
    teacher = kpt.SFTTask.from_preset(OTHER, sequence_length=64)
    engine = kpt.rollout.NativeRollout()
    engine.set_model(teacher)
    size = teacher.causal_lm.backbone.vocabulary_size
    for loss in ("auto", losses.ReinforceLoss()):
        here = sampled(loss)[1:]
        there = sampled(loss, engine, top_k=size)[1:]
        same(here, there, atol=2e-4)


def test_validation_is_on_given_rows():
    task = make()
    compiled(task, **SAMPLING)
    history = task.fit(
        PROMPTS, batch_size=6, validation_data=PAIRS, verbose=0
    ).history
    logs = task.evaluate(PAIRS, 6)
    np.testing.assert_allclose(history["val_loss"], logs["loss"], rtol=1e-5)


# --- Resume ------------------------------------------------------------------


def resumable(directory, epochs, rows, loss, **kwargs):
    task = make(teacher=None if rows is CONTEXT else OTHER)
    compiled(task, loss, optimizer=keras.optimizers.AdamW(1e-3), **kwargs)
    task.fit(
        rows,
        batch_size=2,
        epochs=epochs,
        verbose=0,
        callbacks=[
            kpt.callbacks.Checkpoint(directory, every=2),
            kpt.callbacks.MetricsLog(directory),
        ],
    )
    return task


def test_a_copy_and_learned_maps_are_resumed(tmp_path):
    """The contract's teacher is a preset, and its loss has no weights.

    Here the teacher is a copy of the student, and hidden states are compared
    through maps that are trained: both are in the checkpoint.
    """
    loss = losses.SumLoss([losses.ReverseKLLoss(), losses.HiddenStateLoss()])
    straight = resumable(tmp_path / "a", 2, CONTEXT, loss)
    resumable(tmp_path / "b", 1, CONTEXT, loss)
    resumed = resumable(tmp_path / "b", 2, CONTEXT, loss)
    assert resumed.step == straight.step == 6
    for path, value in weights(straight).items():
        np.testing.assert_array_equal(weights(resumed)[path], value)
    ours, theirs = read_log(tmp_path / "b"), read_log(tmp_path / "a")
    assert [x["loss"] for x in ours] == [x["loss"] for x in theirs]


def test_a_run_with_another_teacher_is_refused(tmp_path):
    resumable(tmp_path, 1, ROWS, losses.ForwardKLLoss())
    task = compiled(
        make(teacher=THIRD),
        losses.ForwardKLLoss(),
        optimizer=keras.optimizers.AdamW(1e-3),
    )
    with pytest.raises(ValueError, match="teachers"):
        task.fit(
            ROWS,
            batch_size=2,
            epochs=2,
            verbose=0,
            callbacks=[kpt.callbacks.Checkpoint(tmp_path, every=2)],
        )


# --- Errors ------------------------------------------------------------------


def test_a_teacher_that_is_the_student():
    student = make().causal_lm
    with pytest.raises(ValueError, match="another model than the student"):
        kpt.DistillTask(student, teacher=student, sequence_length=64)
    with pytest.raises(ValueError, match="must be a preset"):
        kpt.DistillTask(student, teacher=3, sequence_length=64)


@pytest.fixture(scope="module")
def refusing():
    """A task that nothing compiles."""
    return make()


# No paths of `one_layer`: the tests' names must be the same in each worker.
@pytest.mark.parametrize(
    "made, settings, message",
    [
        ({"teacher": MODELS / "gemma2"}, {}, "other ids.*ULDLoss"),
        ({}, {"loss": losses.SFTLoss()}, "asks nothing of the teacher"),
        ({}, {"loss": losses.DPOLoss()}, "a loss of a teacher"),
        ({}, {"loss": losses.GRPOLoss()}, "on_policy=True"),
        ({}, {"loss": losses.HiddenStateLoss(layers=[(0, 9)])}, "has 1"),
        ({}, {"top_k": 8}, "Leave `top_k` out"),
        ({}, {"teacher_cache": "x"}, "top_k=64"),
        ({}, {"teacher_cache": "x", "top_k": 10**6}, "at most the vocab"),
        ({}, {"teacher_weights": [1.0]}, "several teachers"),
        ({}, {"teacher_column": "who"}, "several teachers"),
        (
            {"teacher": [None, MODELS / "llama3_ref"]},
            {"teacher_weights": [1.0]},
            "each of the 2 teachers",
        ),
        (
            {},
            {
                "teacher_cache": "x",
                "top_k": 8,
                "on_policy": True,
                "max_completion_length": 8,
            },
            "nothing to write down",
        ),
        (
            {},
            {
                "teacher_cache": "x",
                "top_k": 8,
                "loss": losses.HiddenStateLoss(),
            },
            "reads the inside",
        ),
        ({}, {"num_generations": 2}, "on_policy=True"),
        ({}, {"on_policy": 2}, "share from 0 to 1"),
        (
            {},
            {
                "on_policy": 0.5,
                "num_generations": 2,
                "max_completion_length": 8,
            },
            "`num_generations` must be 1",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_cannot_be_compiled(made, settings, message, refusing):
    task = make(**made) if made else refusing
    with pytest.raises(ValueError, match=message):
        task.compile(**settings)


def test_what_cannot_be_fitted():
    task = compiled(make(), losses.ReinforceLoss(), **SAMPLING)
    with pytest.raises(ValueError, match="no value on given rows"):
        task.evaluate(PAIRS)
    with pytest.raises(ValueError, match="packing=True"):
        task.fit(PROMPTS, share_prefix=True)
    with pytest.raises(ValueError, match="NativeRollout\\(compile_ahead"):
        task.fit(PROMPTS, compile_ahead=True)
    attention = compiled(make(), losses.AttentionLoss())
    with pytest.raises(ValueError, match="key by key"):
        attention.fit(CONTEXT, verbose=0)
    named = make(teacher={"a": None, "b": OTHER})
    compiled(named, teacher_column="who")
    wrong = [{**row, "who": who} for row, who in zip(ROWS, "abc")]
    with pytest.raises(ValueError, match="row 2.*'c'"):
        named.fit(wrong, verbose=0)


def test_later_runs_use_the_programs_of_earlier_ones():
    """Of sampling, of both models' log-probabilities and of the step."""
    task = compiled(
        make(),
        losses.GRPOLoss(beta=0.0),
        on_policy=True,
        max_completion_length=6,
    )
    with lowered() as first:
        task.fit(PROMPTS, batch_size=6, verbose=0)
    with lowered() as second:
        task.fit(PROMPTS, batch_size=6, verbose=0)
    assert first and not second
    engine = task.rollout
    compiled(task, on_policy=True, max_completion_length=6)
    assert task.rollout is engine
