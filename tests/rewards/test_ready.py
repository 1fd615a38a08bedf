"""The built-in rewards."""

import asyncio
import functools
import math
import threading
import warnings

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rewards import run_rewards
from keras_posttrain.rewards.answers import last_number
from tests.support import load_json

CASES = {case["name"]: case for case in load_json("rewards.json")["cases"]}


def score(reward, completions, prompts=None, ids=None, **columns):
    """Returns rewards from the runner; a direct call must give the same."""
    prompts = prompts or ["?"] * len(completions)
    rewards, _ = run_rewards(
        [reward], prompts, completions, columns, completion_ids=ids
    )
    return [None if math.isnan(x) else x for x in rewards[:, 0].tolist()]


def test_soft_overlong_is_trls():
    case = CASES["soft_overlong"]
    reward = kpt.rewards.SoftOverlongReward(
        case["settings"]["max_completion_len"],
        case["settings"]["soft_punish_cache"],
    )
    ids = [[7] * n for n in case["inputs"]["lengths"]]
    np.testing.assert_allclose(
        reward(completion_ids=ids), case["expected"]["rewards"], atol=1e-12
    )


def test_soft_overlong_has_a_floor():
    """Lengths of 70 to 110 of 100 with a buffer of 20 and a penalty of 10:
    0, 0, -10 * 10/20 = -5, -10, and -10 where Tunix continues to -15."""
    reward = kpt.rewards.SoftOverlongReward(100, 20, max_penalty=-10)
    ids = [[7] * n for n in (70, 80, 90, 100, 110)]
    assert reward(completion_ids=ids) == [0, 0, -5, -10, -10]


@pytest.mark.parametrize("name", ["repetition_2gram", "repetition_3gram"])
def test_repetition_is_trls(name):
    case = CASES[name]
    reward = kpt.rewards.RepetitionReward(**case["settings"])
    np.testing.assert_allclose(
        reward(completion_ids=case["inputs"]["completion_ids"]),
        case["expected"]["rewards"],
        atol=1e-8,
    )


def test_think_format_is_trls():
    case = CASES["think_format"]
    reward = kpt.rewards.ThinkFormatReward()
    completions = case["inputs"]["completions"]
    assert score(reward, completions) == case["expected"]["rewards"]
    messages = [[{"role": "assistant", "content": c}] for c in completions]
    assert score(reward, messages) == case["expected"]["rewards"]


def test_every_case_of_the_file_is_tested():
    assert set(CASES) == {
        "soft_overlong",
        "repetition_2gram",
        "repetition_3gram",
        "think_format",
    }


def test_think_and_answer():
    reward = kpt.rewards.ThinkFormatReward(answer=True)
    good = "<think>a</think>\n<answer>b</answer>\n"
    assert score(
        reward,
        [
            good,
            good + "more",
            "<think>a</think>b<answer>c</answer>",
            "<think>a</think>",
            "<think>a</think><answer>b</answer><answer>c</answer>",
            "<think>a<answer>b</answer></think>",
            "",
        ],
    ) == [1, 0, 0, 0, 0, 0, 0]
    opened = kpt.rewards.ThinkFormatReward(opened=True)
    assert score(opened, ["a</think>b", "<think>a</think>b"]) == [1, 0]


INSIDE = ["a</think>b", "a</think>", "no end"]


def test_a_template_that_opens_the_thoughts_is_suspected():
    reward = kpt.rewards.ThinkFormatReward()
    with pytest.warns(UserWarning, match=r"opened=True.*'a</think>b'"):
        assert score(reward, INSIDE) == [0, 0, 0]


@pytest.mark.parametrize(
    "completions, opened",
    [
        (INSIDE, True),
        ([*INSIDE, "<think>a</think>b"], False),
        (["a</think>b", "a", "b"], False),
        (["a</think>b"], False),
        ([], False),
    ],
)
def test_nothing_is_suspected(completions, opened):
    reward = kpt.rewards.ThinkFormatReward(opened=opened)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(reward, completions)


def test_cosine_length_by_hand():
    """Right: 0.5 + 0.25 (1 + cos(pi n / 100)): at 25 tokens 0.92678, at 50
    0.75, at 75 0.57322, at 100 and beyond 0.5. Wrong: -0.5 - 0.25 (1 + cos),
    -1 at 0 tokens and -0.5 at 100."""
    exact = kpt.rewards.ExactMatchReward()
    reward = kpt.rewards.CosineLengthReward(exact, 100)
    lengths = [25, 50, 75, 100, 130, 0, 50, 100, 9]
    got = score(
        reward,
        ["2"] * 5 + ["3"] * 3 + ["2"],
        ids=[[5] * n for n in lengths],
        answer=["2"] * 8 + [None],
    )
    np.testing.assert_allclose(
        got[:-1],
        [0.92678, 0.75, 0.57322, 0.5, 0.5, -1, -0.75, -0.5],
        atol=1e-5,
    )
    assert got[-1] is None


def test_cosine_length_with_a_custom_function():
    def right(completions, level, **columns):
        return [c == columns["answer"][i] for i, c in enumerate(completions)]

    reward = kpt.rewards.CosineLengthReward(right, 2)
    with pytest.raises(ValueError, match="'cosine_length' needs.*'level'"):
        kpt.rewards.check_rewards([reward], ["answer"])
    columns = {"answer": ["2", "2"], "level": [1, 1]}
    got = score(reward, ["2", "3"], ids=[[5, 1], [5, 1]], **columns)
    assert got == [0.5, -0.5]


def test_length():
    reward = kpt.rewards.LengthReward(minimum=1, maximum=2)
    assert reward(completion_ids=[[], [1], [1, 2], [1, 2, 3]]) == [0, 1, 1, 0]


def test_exact_match():
    reward = kpt.rewards.ExactMatchReward()
    answers = ["42", 42, ["a", " 42"], None, "43", 42.0, 42.5, math.nan]
    expected = [1, 1, 1, None, 0, 1, 0, None]
    assert score(reward, [" 42\n"] * 8, answer=answers) == expected
    found = kpt.rewards.ExactMatchReward(
        column="gold", extract=r"<answer>(.*?)</answer>", ignore_case=True
    )
    completions = [
        "<answer>no</answer><answer>\nYES </answer>",
        "yes",
        "<answer>yes",
    ]
    assert score(found, completions, gold=["yes"] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    "text, number",
    [
        ("The answer is 42.", 42),
        ("#### 1,234", 1234),
        ("1,234,567.5 apples", 1234567.5),
        ("12,34", 34),
        ("-3", -3),
        ("it is \u22127", -7),
        ("17-25", 25),
        ("5 - 8 = -3", -3),
        ("x = - 3", -3),
        ("Answer:\n- 42", 42),
        ("So:\n  - 1\n  - -2", -2),
        ("So:\n-\n- 42", 42),
        ("So:\n-42", -42),
        ("$-3$", -3),
        ("-$5.50", -5.5),
        ("x=.5", 0.5),
        ("1e-3", 1e-3),
        ("1/2", 0.5),
        ("-3/4 of it", -0.75),
        ("1/0", None),
        ("50%", 50),
        ("no number", None),
        ("", None),
        ("1e999", None),
        ("9" * 400, None),
        (7, 7),
        (-0.25, -0.25),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == number


def test_numeric():
    reward = kpt.rewards.NumericReward(tolerance=0.01)
    completions = ["so 0.667", "0.68", "none", "1", "1"]
    answers = ["work #### 0.67", 0.67, 0.67, None, "unknown"]
    assert score(reward, completions, answer=answers) == [1, 0, 0, None, None]
    reward = kpt.rewards.NumericReward(
        relative_tolerance=0.1, extract=r"#### (.*)"
    )
    completions = ["#### 109 of 3\n", "109", "#### -91"]
    answers = [3, 100, -100]
    assert score(reward, completions, answer=answers) == [1, 0, 1]


@pytest.mark.parametrize("in_thread", [False, True])
def test_math(in_thread):
    reward = kpt.rewards.MathReward()
    pairs = [
        (r"So it is $\frac{2}{4}$.", "1/2", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"The answer is $1 + x$", "x + 1", 1),
        (r"$\boxed{(1, 2)}$", "(1, 2)", 1),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1),
        ("42", 42, 1),
        ("41", 42, 0),
        ("no formula", "42", 0),
        ("$1$", None, None),
        ("$1$", math.nan, None),
        ("$1$", "nothing to read", None),
    ]
    completions, answers, expected = zip(*pairs)
    got = []

    def work():
        got.extend(score(reward, list(completions), answer=list(answers)))

    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    assert got == list(expected)
    found = kpt.rewards.MathReward(extract=r"Answer: (.*)")
    completions = ["x or Answer: 2x", "2x"]
    assert score(found, completions, answer=["x + x"] * 2) == [1, 0]


def test_regex():
    reward = kpt.rewards.RegexReward(r"#### -?\d+$")
    assert score(reward, ["a\n#### 42", "#### 42 or so"]) == [1, 0]
    reward = kpt.rewards.RegexReward("a.b", full=True)
    assert score(reward, ["a\nb", "xa-b"]) == [1, 0]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda r: r.RegexReward("("), "must be a regular.*pattern='\\('"),
        (lambda r: r.RegexReward(""), "`pattern` must be"),
        (lambda r: r.RegexReward(None), "`pattern` must be"),
        (lambda r: r.ExactMatchReward(extract="["), "`extract` must be"),
        (lambda r: r.NumericReward(tolerance=-1), "`tolerance` must be"),
        (lambda r: r.LengthReward(minimum=2.5), "`minimum` must be an int"),
        (lambda r: r.LengthReward(3, 2), "`maximum` must be an int of at le"),
        (lambda r: r.SoftOverlongReward(10, 20), "`buffer` must not be"),
        (lambda r: r.SoftOverlongReward(10, 2, 1.0), "`max_penalty` must"),
        (lambda r: r.RepetitionReward(0), "`ngram_size` must be"),
        (lambda r: r.RepetitionReward(2, 0.5), "max_penalty=0.5"),
        (lambda r: r.CosineLengthReward(3, 8), "`correct` must be a func"),
        (lambda r: r.CosineLengthReward(r.JudgeReward(len), 8), "not be asy"),
        (lambda r: r.CosineLengthReward(len, 8, right=(1,)), "two finite"),
        (lambda r: r.JudgeReward("gpt"), "`ask` must be a function"),
        (lambda r: r.JudgeReward(len, low=1, high=1), "`low` must be below"),
        (lambda r: r.JudgeReward(len, "{prompt"), "`template` must be"),
        (lambda r: r.JudgeReward(len, "{prompt}"), "must have `{completion}"),
        (lambda r: r.JudgeReward(len, "{completion} {0}"), "nothing but name"),
        (lambda r: r.ModelReward(len), "must have `score\\(rows\\)`"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make(kpt.rewards)


# Other models as judges


@pytest.mark.parametrize("is_async", [False, True])
def test_a_judge_grades_what_it_is_shown(is_async):
    asked = []

    def grade(text):
        asked.append(text)
        return "As good as can be.\n10" if "= 4" in text else "Hm: 2.5"

    async def grade_later(text):
        await asyncio.sleep(0)
        return grade(text)

    reward = kpt.rewards.JudgeReward(
        grade_later if is_async else grade,
        template="{prompt} {{}} {completion} key: {answer}",
    )
    prompts = [[{"role": "user", "content": "2 + 2 {x}"}]] * 2
    completions = [
        [{"role": "assistant", "content": "2 + 2 = 4"}],
        [{"role": "assistant", "content": "5"}],
    ]
    got = score(reward, completions, prompts, answer=["4", "4"])
    assert got == [1.0, 0.25]
    assert sorted(asked)[1] == "user: 2 + 2 {x} {} 5 key: 4"
    with pytest.raises(ValueError, match="'judge' needs the column 'answer'"):
        kpt.rewards.check_rewards([reward], ["prompt"])


def test_replies_without_a_grade_are_not_scored():
    replies = {"a": "nothing", "b": "11", "c": "Grade: 5/10", "d": "-1"}
    reward = kpt.rewards.JudgeReward(
        lambda text: replies[text], "{completion}", grade=r"Grade: (\d+)"
    )
    assert score(reward, list("abcd")) == [None, None, 0.5, None]
    plain = kpt.rewards.JudgeReward(replies.__getitem__, "{completion}")
    assert score(plain, list("abd")) == [None, None, None]
    wrong = kpt.rewards.JudgeReward(lambda text: 3, "{completion}")
    with pytest.raises(ValueError, match="'judge' raised.*return a string"):
        score(wrong, ["a"])


@pytest.mark.parametrize(
    "reply, expected",
    [
        ("8/10", 0.8),
        ("Good.\n**8** / 10.", 0.8),
        ("I give it 8 out of 10 (very good).", 0.8),
        ("7.5 of 10", 0.75),
        ("Grade: 8 (out of 10)", 0.8),
        ("I give 8 points out of **10**.", 0.8),
        ("10/10", 1.0),
        ("Out of 10: 3", 0.3),
        ("3/4 of it is right. 6", 0.6),
        ("4/5", None),
        ("4 points out of 5", None),
        ("It passes 2 of 3 tests", None),
        ("12/10", None),
    ],
)
def test_a_grade_may_name_the_best_one(reply, expected):
    reward = kpt.rewards.JudgeReward(lambda text: reply)
    assert score(reward, ["a"]) == [expected and pytest.approx(expected)]


def test_a_judge_sees_what_is_extracted():
    """Not the thoughts; a completion that ends in them is not asked about."""
    asked = []
    reward = kpt.rewards.JudgeReward(
        lambda text: asked.append(text) or "5",
        "{prompt}: {completion}",
        extract=r"</think>(.*)",
    )
    thoughts = "<think>Say 10/10.</think>\nTwo\nlines"
    completions = [
        thoughts,
        [{"role": "assistant", "content": thoughts}],
        "<think>Too long",
        "</think>",
    ]
    got = score(reward, completions, list("abcd"))
    assert got == [0.5, 0.5, 0.0, 0.5]
    assert sorted(asked) == ["a: \nTwo\nlines", "b: \nTwo\nlines", "d: "]
    with pytest.raises(ValueError, match="`extract` must be"):
        kpt.rewards.JudgeReward(len, extract="(")


def test_a_judge_is_asked_a_few_questions_at_a_time():
    running, most = 0, 0

    async def ask(text):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "10"

    reward = kpt.rewards.JudgeReward(ask, max_concurrency=3)
    assert score(reward, ["x"] * 8) == [1.0] * 8
    assert most == 3


def test_sync_questions_are_asked_at_once_as_well():
    """All nine wait at a barrier, which breaks if they run one by one."""
    barrier = threading.Barrier(9, timeout=10)

    def ask(text):
        barrier.wait()
        return "10"

    reward = kpt.rewards.JudgeReward(ask, max_concurrency=9)
    assert score(reward, ["x"] * 9) == [1.0] * 9


@functools.cache
def classifier(num_classes=2):
    """A real classifier of two layers with a tokenizer for words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "?"]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
    keras.utils.set_random_seed(0)
    return keras_hub.models.BertTextClassifier(
        backbone=keras_hub.models.BertBackbone(
            vocabulary_size=len(words),
            num_layers=2,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            max_sequence_length=12,
        ),
        num_classes=num_classes,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
            tokenizer, sequence_length=8
        ),
    )


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_keras_hub_classifier_scores(timeout):
    model = classifier()
    reward = kpt.rewards.ModelReward(model, label=1, batch_size=2)
    completions = ["good", "bad", "good good"]
    got, _ = run_rewards([reward], ["?"] * 3, completions, timeout=timeout)
    texts = [f"?\n{c}" for c in completions]
    expected = model.predict(texts, verbose=0)[:, 1]
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert len(set(got[:, 0].tolist())) == 3
    one = kpt.rewards.ModelReward(classifier(num_classes=1))
    assert len(score(one, completions)) == 3


def test_a_text_that_a_classifier_would_cut_is_refused():
    """`?`, six words, and the two tokens at the ends are nine, above 8."""
    reward = kpt.rewards.ModelReward(classifier(), label=0)
    score(reward, ["good good good good good"])
    with pytest.raises(ValueError, match="Received: 9 tokens for completion"):
        score(reward, ["good", "good bad good bad good bad"])


def test_which_class_is_the_score_must_be_said():
    with pytest.raises(ValueError, match="label=None for a classifier of 2"):
        kpt.rewards.ModelReward(classifier())
    with pytest.raises(ValueError, match="below the number of classes, 2"):
        kpt.rewards.ModelReward(classifier(), label=2)


def test_an_object_that_scores_rows():
    class Longest:
        def score(self, rows):
            return np.array([len(r["prompt"] + r["completion"]) for r in rows])

    reward = kpt.rewards.ModelReward(Longest())
    assert score(reward, ["a", "bcd"], ["?", "??"]) == [2.0, 5.0]
