"""Arithmetic on the text that a model wrote, without running it."""

import ast
import operator

MAX_LENGTH = 1000
# Of a whole number, so that no expression takes long.
MAX_BITS = 4096
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def arithmetic(expression):
    """Works out an arithmetic expression in Python's notation.

    It may have numbers, parentheses and `+ - * / // % **`. Nothing of it is
    run, and its size is bounded, so that it can be used in the process that
    trains.

    Args:
        expression: string of at most 1,000 characters.

    Returns:
        An int or a float.

    Raises:
        ValueError: if it is no such expression, has no real value, or one
            that is too large: a whole number of more than 4,096 bits, a float
            above the largest one.

    Example:

    ```python
    def calculator(expression: str) -> str:
        return str(kpt.episodes.arithmetic(expression))
    ```
    """
    try:
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH} characters")
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (
        SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError
    ) as error:  # fmt: skip
        reason = getattr(error, "msg", None) or error
        raise ValueError(
            "`expression` must be arithmetic such as '3 * (4 + 5)'. Received: "
            f"expression={expression[:100]!r}, {reason}."
        ) from error


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    function = OPERATORS.get(type(getattr(node, "op", None)))
    if function is None:
        raise ValueError(f"in which {ast.unparse(node)!r} is no number")
    if isinstance(node, ast.UnaryOp):
        return function(_value(node.operand))
    left, right = _value(node.left), _value(node.right)
    if function is operator.pow and isinstance(left, int):
        # Before it is computed: at least this many bits.
        bits = (left.bit_length() - 1) * right
        if isinstance(right, int) and bits > MAX_BITS:
            raise ValueError("which is too large")
    return _checked(function(left, right))


def _checked(value):
    if isinstance(value, complex):
        raise ValueError("which is no real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("which is too large")
    if isinstance(value, float) and value - value != 0:
        raise ValueError("which is not finite")
    return value
