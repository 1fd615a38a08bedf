"""Python functions become tools as `transformers` makes them."""

import enum
import typing

import pytest
import transformers.utils

from keras_posttrain.episodes.schema import json_schema


class Color(enum.Enum):
    RED = "red"
    TEN = 10


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    It knows + and *.

    Args:
        expression: such as "3 * (4 + 5)",
            over several lines: of text.

    Returns:
        The value.
    """


def plain():
    """Takes nothing."""


def wide(
    a: int,
    b: float | None,
    c: list[dict[str, int]],
    d: typing.Literal["x", "y"],
    e: int | str = 3,
    f: tuple[int, str] = (1, "a"),
    g: list | dict[str, bool] = (),
    h: typing.Any = None,
    *,
    i: typing.Literal["x", 1] = 1,
    j: typing.Optional[list[str]] = None,  # noqa: UP045
    k: Color = Color.RED,
    l: list | tuple = (),  # noqa: E741
    m: bool = True,
) -> dict[str, list[int]]:
    """Takes much.

    Args:
        a: the first
        b: the second
        c: the third

        d: the fourth
        e: the fifth
        f: the sixth
        g: the seventh
        h: the eighth
        i: the ninth
        j: the tenth
        k: the eleventh
        l: the twelfth
        m: the last

    Returns:
        Numbers by name.

    Raises:
        ValueError: never.
    """


async def odd_return(x: int) -> Color | set:
    """Returns what no schema says.

    Args:
        x: a number.
    """


class Shop:
    def buy(self, what: str) -> None:
        """Buys.

        Args:
            what: a thing.
        """


@pytest.mark.parametrize(
    "function", [calculator, plain, wide, odd_return, Shop().buy]
)
def test_schemas_are_those_of_transformers(function):
    expected = transformers.utils.get_json_schema(function)
    assert json_schema(function) == expected
    assert list(expected["function"]["parameters"]["properties"]) == list(
        json_schema(function)["function"]["parameters"]["properties"]
    )


def test_types_in_the_docstring_are_left_out():
    def add(a: int):
        """Adds.

        Args:
            a (int): a number.

        Example:
            b: nothing.
        """

    properties = json_schema(add)["function"]["parameters"]["properties"]
    assert properties == {"a": {"type": "integer", "description": "a number."}}


def undescribed(a: int, b: int):
    """Adds.

    Args:
        a: a number.
    """


def unhinted(a):
    """Adds.

    Args:
        a: a number.
    """


def empty(a: int):
    pass


def foreign(a: set[int]):
    """Adds.

    Args:
        a: a number.
    """


def positional(a: int, /):
    """Adds.

    Args:
        a: a number.
    """


def starred(*numbers: int):
    """Adds.

    Args:
        numbers: some.
    """


def unknown(a: "Nowhere"):  # noqa: F821
    """Adds.

    Args:
        a: a number.
    """


class Strange(enum.Enum):
    LIST = (1, 2)


def values(a: Strange):
    """Adds.

    Args:
        a: a number.
    """


@pytest.mark.parametrize(
    "function, message",
    [
        (undescribed, "'undescribed', whose parameter 'b' has no description"),
        (unhinted, "'unhinted', whose parameter 'a' has no type hint. Use st"),
        (empty, "'empty' with no docstring"),
        (foreign, r"'foreign', whose parameter 'a' has the type hint set\[i"),
        (positional, "'positional', whose parameter 'a' has the kind POSITI"),
        (starred, "'starred', whose parameter 'numbers' has the kind VAR_PO"),
        (unknown, "'unknown' with a type hint that is unknown.*Nowhere"),
        (values, "'values', whose parameter 'a' has .*Strange.* the values"),
        (Shop.buy, "'buy', whose parameter 'self' has no type hint"),
        (3, "a function or a method with a name. Received: 3"),
    ],
)
def test_what_a_tool_lacks_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        json_schema(function)
