"""Compares formulas, in a worker process.

A worker loads this file alone, so that it imports nothing of this package.
"""

import logging
import re


def grader():
    """Loads the library and returns `grade`."""
    # An optional dependency.
    import math_verify

    # Formulas that cannot be read or compared are no news.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def parse(text):
        # The process has a time limit.
        return math_verify.parse(text, parsing_timeout=None)

    def grade(text, answer, extract):
        """Compares the formula in a text with an answer.

        Args:
            text, answer: strings.
            extract: string or `None`, as in `MathReward`.

        Returns:
            1.0 or 0.0; `None` if the answer cannot be parsed.
        """
        expected = parse(as_formula(answer))
        if not expected:
            return None
        text = last_match(extract, text)
        if text is None:
            return 0.0
        parsed = parse(as_formula(text) if extract else text)
        verify = math_verify.verify
        return float(verify(expected, parsed, timeout_seconds=None))

    # The first call builds the parser.
    grade("$1$", "1", None)
    return grade


def as_formula(text):
    """Adds `$` around a bare formula, so that all of it is parsed."""
    is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    has_words = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return text if is_marked or has_words else f"${text}$"


def last_match(pattern, text):
    """Returns the last match or its first group, the text for `None`."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    return matches[-1][1 if matches[-1].re.groups else 0]
