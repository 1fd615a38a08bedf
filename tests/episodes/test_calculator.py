"""Arithmetic: what Python computes, and nothing else."""

import time

import numpy as np
import pytest

from keras_posttrain.episodes.calculator import arithmetic


@pytest.mark.parametrize(
    "expression, value",
    [
        ("3 * (4 + 5)", 27),
        (" 2 + 2\n", 4),
        ("-2 ** 2", -4),
        ("7 // 2 + 7 % 3 - +1", 3),
        ("1 / 4", 0.25),
        ("2 ** 0.5", 2**0.5),
        ("2 ** -1", 0.5),
        ("1_000 + 1e3", 2000.0),
        ("2 ** 300", 2**300),
        ("1 ** 9 ** 99", 1),
        ("(-8) ** 3", -512),
        ("0 ** (10 ** 9)", 0),
    ],
)
def test_values(expression, value):
    found = arithmetic(expression)
    assert found == value and type(found) is type(value)


def test_random_expressions_are_python_s():
    rng = np.random.default_rng(0)

    def make(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.integers(0, 9) / rng.choice([1, 2]))
        kind = rng.choice(["+", "-", "*", "/", "//", "%", "neg"])
        if kind == "neg":
            return f"-({make(depth - 1)})"
        return f"({make(depth - 1)}) {kind} ({make(depth - 1)})"

    for _ in range(300):
        expression = make(4)
        try:
            want = eval(expression)
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="expression="):
                arithmetic(expression)
        else:
            assert arithmetic(expression) == want


@pytest.mark.parametrize(
    "expression, words",
    [
        ("", "invalid syntax"),
        ("1 +", "invalid syntax"),
        ("1; 2", "invalid syntax"),
        ("x + 1", "'x' is no number"),
        ("__import__('os').system('true')", "is no number"),
        ("(1).real", "is no number"),
        ("[1][0]", "is no number"),
        ("1 if 1 else 2", "is no number"),
        ("1 < 2", "is no number"),
        ("1 and 2", "is no number"),
        ("True + 1", "'True' is no number"),
        ("'a' * 9", "is no number"),
        ("1j * 1j", "'1j' is no number"),
        ("6 ^ 3", "is no number"),
        ("~1", "is no number"),
        ("1 << 99", "is no number"),
        ("f'{1}'", "is no number"),
        ("(y := 1)", "is no number"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "negative power"),
        ("(-1) ** 0.5", "no real number"),
        ("1e308 * 10", "not finite"),
        ("1e999", "not finite"),
        ("2.0 ** 9999", "out of range"),
        ("2 ** 5000", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 1000 * 10 ** 1000", "too large"),
        ("1" * 900 + " ** 999999999", "too large"),
        ("2 ** 4000 / 3.0", "too large"),
        ("(" * 400 + "1" + ")" * 400, "expression="),
        ("-" * 999 + "1", "expression="),
        ("+".join("1" * 501), "more than 1000 characters"),
        ("1\0", "null"),
    ],
)
def test_everything_else_is_refused_at_once(expression, words):
    start = time.monotonic()
    try:
        # Deep ones may be worked out too.
        assert arithmetic(expression) in (1, -1)
        assert words == "expression="
    except ValueError as error:
        assert words in str(error) and "expression=" in str(error)
        assert len(str(error)) < 1500
    assert time.monotonic() - start < 1
