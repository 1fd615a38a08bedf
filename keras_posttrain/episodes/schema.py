"""Python functions as tools: JSON schemas from signatures and docstrings."""

import enum
import inspect
import re
import types
import typing

_SCALARS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_NAMES = _SCALARS | {list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?):$")
_ARGUMENT = re.compile(r"(\w+)(?: *\([^)]*\))?: *(.*)", re.DOTALL)
_HINTS = "str, int, float, bool, list, dict, Literal, Enum, Union or Optional"


def json_schema(function):
    """Describes a function as a tool, as chat templates render it.

    The schema is that of `transformers.utils.get_json_schema`.

    Args:
        function: a function or a bound method with type hints and a
            docstring in Google's style, whose `Args:` describe each parameter.

    Returns:
        Dict with `"type": "function"` and `"function"`: its `"name"`,
        `"description"` and `"parameters"`, and `"return"` where a type hint
        says what it returns.

    Raises:
        ValueError: a type hint or a description is missing or unknown, or a
            parameter cannot be passed by name.

    Example:

    ```python
    def calculator(expression: str) -> str:
        \"\"\"Works out an arithmetic expression.

        Args:
            expression: such as "3 * (4 + 5)".
        \"\"\"

    json_schema(calculator)["function"]["parameters"]
    ```
    """
    name = getattr(function, "__name__", None)
    if name is None or not callable(function):
        raise ValueError(
            "A tool must be a function or a method with a name. Received: "
            f"{function!r}. Wrap it in a function."
        )
    summary, described, returns = _read_docstring(function)
    if not summary:
        raise _fault(name, "", "no docstring", 'Write """What it does."""')
    try:
        # An object around a function has annotations of its own.
        hints = typing.get_type_hints(inspect.unwrap(function))
    except NameError as error:
        raise _fault(
            name, "", f"a type hint that is unknown: {error}", "Import it"
        ) from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        _check_parameter(name, parameter, hints, described)
        own = parameter.name
        try:
            properties[own] = _schema_of(hints[own])
        except TypeError as error:
            fix = f"Use {_HINTS}"
            raise _fault(name, own, f"the type hint {error}", fix) from error
        properties[own]["description"] = described[own]
        if parameter.default is parameter.empty:
            required.append(own)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    tool = {"name": name, "description": summary, "parameters": parameters}
    try:
        tool["return"] = _schema_of(hints["return"])
        tool["return"] |= {"description": returns} if returns else {}
    except (KeyError, TypeError):
        # The model reads it, and need not.
        pass
    return {"type": "function", "function": tool}


def _check_parameter(function, parameter, hints, described):
    """Raises where a parameter cannot be passed by name or lacks something."""
    own = parameter.name
    named = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if parameter.kind not in named:
        fix = "Tools are called by name: give each parameter one"
        raise _fault(function, own, f"the kind {parameter.kind.name}", fix)
    if own not in hints:
        raise _fault(function, own, "no type hint", f"Use {_HINTS}")
    if not described.get(own):
        fix = f"Describe it under `Args:` as `{own}: what it is`"
        raise _fault(function, own, "no description", fix)


def _fault(function, parameter, received, fix):
    of = f", whose parameter {parameter!r} has" if parameter else " with"
    return ValueError(
        "A tool needs a docstring, and a type hint and a description for each "
        f"parameter. Received: the function {function!r}{of} {received}. "
        f"{fix}."
    )


def _schema_of(hint):
    """Returns the JSON schema of a type hint; a `TypeError` names another."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _schema_of_values([member.value for member in hint], hint)
    if origin is None and isinstance(hint, type) and hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is typing.Literal:
        return _schema_of_values(list(args), hint)
    if origin in (typing.Union, types.UnionType):
        return _schema_of_union(args)
    if origin is list:
        return {"type": "array", "items": _schema_of(args[0])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_schema_of(a) for a in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    raise TypeError(f"{hint!r}")


def _schema_of_values(values, hint):
    if not values or any(type(value) not in _SCALARS for value in values):
        raise TypeError(f"{hint!r} with the values {values}")
    names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _schema_of_union(hints):
    parts = [_schema_of(hint) for hint in hints if hint is not type(None)]
    if len(parts) == 1:
        [schema] = parts
    elif all(part.keys() == {"type"} for part in parts):
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in hints else {})


def _read_docstring(function):
    """Reads a docstring in Google's style.

    Returns:
        Tuple `(summary, arguments, returns)`: a string, a dict of names to
        descriptions, and a string.
    """
    sections, section = {"": []}, ""
    for line in (inspect.getdoc(function) or "").splitlines():
        header = _SECTION.match(line)
        if header:
            section = header[1].replace("Arguments", "Args")
            sections[section] = []
        else:
            sections[section].append(line)
    text = {name: "\n".join(lines) for name, lines in sections.items()}
    arguments = {}
    # Each begins at the smallest indentation.
    for entry in re.split(
        r"\n(?! )", inspect.cleandoc("\n" + text.get("Args", ""))
    ):
        found = _ARGUMENT.match(entry)
        if found:
            arguments[found[1]] = re.sub(r"\s*\n\s*", " ", found[2]).strip()
    returns = inspect.cleandoc("\n" + text.get("Returns", ""))
    return text[""].strip(), arguments, returns
