"""BLEU, ROUGE and exact match."""

import dataclasses
import functools
import importlib.util
import re
import string
from collections.abc import Callable

from keras_posttrain.metrics.metric import Metric

ORDER = 4


@dataclasses.dataclass(frozen=True)
class BLEU(Metric):
    """Corpus BLEU from 0 to 100, as sacrebleu computes it.

    The counts of n-grams of all rows are added up, so that it is no mean over
    rows. Orders of which the predictions have no n-gram at all are left out:
    sacrebleu's `corpus_bleu` gives 0 there, an exact match of three tokens
    for example, unless `effective_order` is set. All other values equal its.

    Needs the package sacrebleu: `pip install keras_posttrain[metrics]`.

    Args:
        tokenize: str, the tokenizer of sacrebleu: `"13a"`, `"intl"`, `"zh"`,
            `"char"` or another.
        lowercase: bool, whether upper and lower case are the same.

    References:
        - [Papineni et al., 2002](https://aclanthology.org/P02-1040).
        - [Post, 2018](https://arxiv.org/abs/1804.08771).

    Example:

    ```python
    task.evaluate(rows, metrics=[kpt.metrics.BLEU()])
    ```
    """

    tokenize: str = "13a"
    lowercase: bool = False

    is_mean = False

    def __post_init__(self):
        _need("BLEU", "sacrebleu", "sacrebleu")
        # Made now, so that an unknown tokenizer is an error here.
        _ = self._bleu

    @property
    def name(self):
        return "bleu"

    @functools.cached_property
    def _bleu(self):
        # An optional dependency.
        from sacrebleu.metrics import BLEU as SacreBLEU

        if self.tokenize not in SacreBLEU.TOKENIZERS:
            raise ValueError(
                "`tokenize` must be a tokenizer of sacrebleu, one of "
                f"{list(SacreBLEU.TOKENIZERS)}. Received: "
                f"tokenize={self.tokenize!r}"
            )
        return SacreBLEU(
            tokenize=self.tokenize,
            lowercase=self.lowercase,
            effective_order=True,
        )

    def measure(self, prediction, references, prompt):
        score = self._bleu.sentence_score(prediction, references)
        lengths = [score.sys_len, score.ref_len]
        return [*score.counts, *score.totals, *lengths]

    def value(self, sums, count):
        return self._bleu.compute_bleu(
            correct=[int(x) for x in sums[:ORDER]],
            total=[int(x) for x in sums[ORDER : 2 * ORDER]],
            sys_len=int(sums[-2]),
            ref_len=int(sums[-1]),
            smooth_method="exp",
            effective_order=True,
            max_ngram_order=ORDER,
        ).score


@dataclasses.dataclass(frozen=True)
class ROUGE(Metric):
    """Mean ROUGE F1 from 0 to 1, as rouge-score computes it.

    Of several references the one with the highest F1 counts.

    Needs the package rouge-score: `pip install keras_posttrain[metrics]`.

    Args:
        kind: `"1"` to `"9"` for n-grams, `"L"` for the longest common
            subsequence, `"Lsum"` for that of lines.
        stem: bool, whether suffixes of English words are removed.
        tokenize: function from a text to a list of words, or `None` for
            rouge-score's own, which keeps the letters a to z and digits
            alone: other scripts need another.

    References:
        - [Lin, 2004](https://aclanthology.org/W04-1013).

    Example:

    ```python
    task.evaluate(rows, metrics=[kpt.metrics.ROUGE("L")])
    ```
    """

    kind: str = "L"
    stem: bool = False
    tokenize: Callable | None = None

    def __post_init__(self):
        kinds = [*"123456789", "L", "Lsum"]
        if self.kind not in kinds:
            raise ValueError(
                f"`kind` must be one of {kinds}. Received: kind={self.kind!r}"
            )
        if self.tokenize is not None and not callable(self.tokenize):
            raise ValueError(
                "`tokenize` must be a function of a text, or None. "
                f"Received: tokenize={self.tokenize!r}"
            )
        _need("ROUGE", "rouge_score", "rouge-score")

    @property
    def name(self):
        return f"rouge{self.kind}"

    @functools.cached_property
    def _scorer(self):
        # An optional dependency.
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = self.tokenize and _Words(self.tokenize)
        return RougeScorer([self.name], self.stem, tokenizer=tokenizer)

    def measure(self, prediction, references, prompt):
        return max(
            self._scorer.score(reference, prediction)[self.name].fmeasure
            for reference in references
        )


@dataclasses.dataclass(frozen=True)
class _Words:
    """A function as a tokenizer of rouge-score."""

    tokenize: Callable


@dataclasses.dataclass(frozen=True)
class ExactMatch(Metric):
    """The share of completions that equal a reference.

    Whitespace at both ends is ignored.

    Args:
        normalize: function from a text to a text that both sides pass
            through, such as `kpt.metrics.normalize_answer`, or `None`.

    Example:

    ```python
    task.evaluate(rows, metrics=[kpt.metrics.ExactMatch()])
    ```
    """

    normalize: Callable | None = None

    def __post_init__(self):
        if self.normalize is not None and not callable(self.normalize):
            raise ValueError(
                "`normalize` must be a function of a text, such as "
                "`kpt.metrics.normalize_answer`, or None. Received: "
                f"normalize={self.normalize!r}"
            )

    @property
    def name(self):
        return "exact_match"

    def measure(self, prediction, references, prompt):
        plain = self.normalize or (lambda text: text)
        own = plain(prediction).strip()
        return float(any(own == plain(r).strip() for r in references))


def normalize_answer(text):
    """Normalizes a short answer as SQuAD's evaluation does.

    Lower case, without ASCII punctuation, without the articles a, an and the,
    and with single spaces
    ([Rajpurkar et al., 2016](https://arxiv.org/abs/1606.05250)).

    Example:

    ```python
    kpt.metrics.normalize_answer("The Eiffel Tower!")  # "eiffel tower"
    ```
    """
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _need(name, module, package):
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"`kpt.metrics.{name}` needs the package {package}. Install it: "
            "`pip install keras_posttrain[metrics]`."
        )
