"""Metrics against the libraries that define them, and by hand."""

import itertools
import math

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.chat.byte_counts import byte_counts
from keras_posttrain.metrics.metric import (
    as_metrics,
    measure_texts,
    summarize,
)

PREDICTIONS = [
    "the cat sat on the mat",
    "a dog",
    "it rains in the town today",
    "no",
]
REFERENCES = [
    ["the cat sat on a mat", "a cat was on the mat"],
    ["a dog barks"],
    ["it rains in town today"],
    ["yes it is"],
]
ROWS = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b} é"}
    for a in range(4)
    for b in range(3)
]


def results(metric, predictions, references):
    samples = [
        {"completion": p, "references": r, "prompt": ""}
        for p, r in zip(predictions, references)
    ]
    [metric] = as_metrics([metric])
    return summarize(metric, measure_texts(metric, samples))


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """Presets whose tokenizers have few and many tokens for a text."""
    folder = tmp_path_factory.mktemp("presets")
    coarse = kpt.examples.tiny_preset(folder / "coarse", ROWS * 3)
    fine = kpt.examples.tiny_preset(folder / "fine", ["zz qq"])
    return coarse, fine


@pytest.fixture(scope="module")
def tasks(presets):
    found = []
    for preset in presets:
        task = kpt.SFTTask.from_preset(preset, sequence_length=64)
        task.compile()
        found.append(task)
    return found


def test_bleu_is_that_of_sacrebleu():
    import sacrebleu

    found = results(kpt.metrics.BLEU(), PREDICTIONS, REFERENCES)
    streams = [
        [r[i] if i < len(r) else None for r in REFERENCES] for i in (0, 1)
    ]
    theirs = sacrebleu.corpus_bleu(PREDICTIONS, streams).score
    assert found["bleu"] == pytest.approx(theirs, abs=1e-9)
    assert found["bleu/n"] == 4 and found["bleu/failed"] == 0
    assert 0 < found["bleu/stderr"] < 50
    # The same rows have the same error.
    again = results(kpt.metrics.BLEU(), PREDICTIONS, REFERENCES)
    assert again == found


def test_bleu_of_a_short_exact_match_is_100():
    import sacrebleu

    assert sacrebleu.corpus_bleu(["a b c"], [["a b c"]]).score == 0
    found = results(kpt.metrics.BLEU(), ["a b c"], [["a b c"]])
    assert found["bleu"] == pytest.approx(100)
    assert math.isnan(found["bleu/stderr"])


@pytest.mark.parametrize("kind", ["1", "2", "L"])
def test_rouge_is_that_of_rouge_score(kind):
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([f"rouge{kind}"])
    each = [
        scorer.score_multi(r, p)[f"rouge{kind}"].fmeasure
        for p, r in zip(PREDICTIONS, REFERENCES)
    ]
    found = results(kpt.metrics.ROUGE(kind), PREDICTIONS, REFERENCES)
    assert found[f"rouge{kind}"] == pytest.approx(np.mean(each))
    error = np.std(each, ddof=1) / 2
    assert found[f"rouge{kind}/stderr"] == pytest.approx(error)


def test_rouge_by_hand():
    """Of "a dog" and "a dog barks" two words: P 1, R 2/3, F1 4/5."""
    found = results(kpt.metrics.ROUGE("1"), ["a dog"], [["a dog barks"]])
    assert found["rouge1"] == pytest.approx(0.8)
    words = kpt.metrics.ROUGE("1", tokenize=str.split)
    assert results(words, ["да"], [["да"]])["rouge1"] == 1


def test_exact_match_by_hand():
    """1 of 4 is right: the error is sqrt(0.25 x 0.75 / 3) = 0.25."""
    texts, right = ["The cat!", " 4 ", "x", "y"], [["cat"], ["4"], ["z"], [""]]
    found = results(kpt.metrics.ExactMatch(), texts, right)
    assert found["exact_match"] == 0.25
    assert found["exact_match/stderr"] == pytest.approx(0.25)
    loose = kpt.metrics.ExactMatch(normalize=kpt.metrics.normalize_answer)
    assert results(loose, texts, right)["exact_match"] == 0.5


def test_functions_are_metrics():
    def longer(prediction, reference):
        if not prediction:
            return None
        return len(prediction) > len(reference)

    found = results(longer, ["aaa", "a", ""], [["b"], ["bb"], ["c"]])
    assert found["longer"] == 0.5
    assert found["longer/n"] == 2 and found["longer/failed"] == 1


def test_evaluate_compares_samples_with_rows(tasks):
    task, _ = tasks
    expected = [
        task.generate(r["prompt"], temperature=0, max_tokens=4)
        for r in ROWS[:3]
    ]
    rows = [dict(r, references=[e]) for r, e in zip(ROWS, expected)]
    match = kpt.metrics.ExactMatch()
    found = task.evaluate(
        rows, metrics=[match], max_tokens=4, num_samples=2, verbose=0
    )
    # The sample itself is among the references of its row.
    assert found["exact_match"] == 1 and found["exact_match/n"] == 3
    assert [s["completion"] for s in found["samples"]] == expected[:2]
    assert found["max_tokens_reached"] <= 3
    plain = task.evaluate(ROWS[:3], verbose=0)
    assert found["loss"] == plain["loss"]
    alone = task.evaluate(ROWS[:3], metrics=[match], max_tokens=4, verbose=0)
    assert alone["exact_match"] == 0


def test_bits_per_byte_is_the_sum_by_hand(tasks):
    sizes = []
    for task in tasks:
        found = task.evaluate(
            ROWS, metrics=[kpt.metrics.BitsPerByte()], verbose=0
        )
        examples, _ = task.prepare(ROWS)
        bits = size = 0
        for example, logps in zip(examples, task.log_probs(ROWS)):
            bits -= float(logps[example.completion_mask != 0].sum())
            trained = example.token_ids[example.completion_mask != 0]
            size += byte_counts(task.tokenizer)[trained].sum()
        bits /= math.log(2)
        assert found["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
        assert found["bits_per_byte/n"] == len(ROWS)
        assert found["bits_per_byte/stderr"] > 0
        sizes.append((size, sum(len(e.token_ids) for e in examples)))
    (size, few), (other, many) = sizes
    # Both tokenizers cover the same bytes with another number of tokens.
    text = sum(len(row["completion"].encode()) for row in ROWS)
    assert size == other == text
    assert few < many


def test_errors_come_before_anything_is_compiled(tasks, presets):
    task, _ = tasks
    for metrics, words in (
        ([kpt.metrics.BLEU], "Pass `BLEU\\(\\)`"),
        ([kpt.metrics.BLEU(), kpt.metrics.BLEU()], "different names"),
        (["bleu"], "must be a `kpt.metrics.Metric` or a function"),
        ([lambda x: 0.0], "arguments are named among"),
    ):
        with pytest.raises(ValueError, match=words):
            task.evaluate(ROWS, metrics=metrics)
    with pytest.raises(ValueError, match="'references' must be a list"):
        row = dict(ROWS[0], references="x")
        task.evaluate([row], metrics=[kpt.metrics.ExactMatch()])
    with pytest.raises(ValueError, match="tokenizer of sacrebleu"):
        kpt.metrics.BLEU(tokenize="none of them")
    with pytest.raises(ValueError, match="`kind` must be one of"):
        kpt.metrics.ROUGE("X")
    dpo = kpt.DPOTask.from_preset(presets[0], sequence_length=64)
    dpo.compile()
    grpo = kpt.GRPOTask.from_preset(presets[0], sequence_length=64)
    grpo.compile(rewards=[len], max_completion_length=8)
    for other in (dpo, grpo):
        with pytest.raises(ValueError, match="SFTTask.from_task"):
            other.evaluate([], metrics=[kpt.metrics.ExactMatch()])


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"keras_posttrain\[metrics\]"):
        kpt.metrics.BLEU()
    with pytest.raises(ImportError, match="rouge-score"):
        kpt.metrics.ROUGE()


@pytest.mark.parametrize("n, k", [(5, 1), (5, 2), (5, 5), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets(n, k):
    for right in range(n + 1):
        samples = [i < right for i in range(n)]
        subsets = list(itertools.combinations(samples, k))
        share = sum(map(any, subsets)) / len(subsets)
        assert kpt.metrics.pass_at_k(n, right, k) == pytest.approx(share)
    # Products of large binomials are not formed.
    assert 0 < kpt.metrics.pass_at_k(100_000, 1, 10) < 1.1e-4


@pytest.mark.parametrize("n, right, k", [(4, 1, 5), (4, 1, 0), (4, [5], 1)])
def test_pass_at_k_of_what_cannot_be(n, right, k):
    with pytest.raises(ValueError, match="must be between.*Received"):
        kpt.metrics.pass_at_k(n, right, k)
