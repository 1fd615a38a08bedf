"""Parts of tool calls: where they are in a text, and what their values are."""

import ast
import json
import re
import typing

# What reading a text may raise. The model gets the reason as an answer.
FAULTS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
# Deeper arguments have no use, and overflow the stacks of what reads them.
_LEVELS = 32
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>", "<channel|>"),
)
SPACE = re.compile(r"\s*")
# Backslashes that begin no escape; Python warns about them.
_BACKSLASH = re.compile(r"(\\[\\'\"abfnrtvxNuU0-3\n])|\\")


class ParsedTurn(typing.NamedTuple):
    """A sampled turn, read.

    Args:
        content: string, the text without the calls that could be read.
        calls: list of dicts with `"name"`, `"arguments"` (a dict) and, where
            the model wrote one, `"id"`.
        unreadable: list of strings, what is wrong with each call that could
            not be read.
    """

    content: str
    calls: list
    unreadable: list


def split_thoughts(text):
    """Splits a text behind the model's thoughts, which call nothing."""
    for begin, end in THOUGHTS:
        thoughts, found, rest = text.partition(end)
        if found:
            return thoughts + found, rest
        if begin in text:
            return text, ""
    return "", text


def scan(text, opening, closing, read):
    """Reads all calls that begin with `opening`.

    `read(text, start)` returns a list of calls and where they end, or raises
    one of `FAULTS`: then what follows up to `closing` stays in the content.
    """
    thoughts, rest = split_thoughts(text)
    kept, calls, unreadable, at = [thoughts], [], [], 0
    while (start := rest.find(opening, at)) >= 0:
        kept.append(rest[at:start])
        behind = start + len(opening)
        try:
            found, at = read(rest, behind)
            calls += found
        except FAULTS as error:
            unreadable.append(reason(error))
            end = rest.find(closing, behind)
            at = len(rest) if end < 0 else end + len(closing)
            kept.append(rest[start:at])
    content = "".join([*kept, rest[at:]]).strip() if calls else text
    return ParsedTurn(content, calls, unreadable)


def reason(error):
    """Says what is wrong: the same in each process, without addresses."""
    if isinstance(error, (RecursionError, MemoryError)):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no valid JSON: {error.msg}"
    if isinstance(error, SyntaxError):
        return f"it is no valid Python: {error.msg}"
    return str(error)


def read_json(text, at):
    """Reads the JSON value at a place; returns it and where it ends."""
    return json.JSONDecoder().raw_decode(text, SPACE.match(text, at).end())


def as_call(value, key="arguments"):
    """Checks a call, and returns it as of `ParsedTurn`."""
    if not isinstance(value, dict):
        raise ValueError("a call must be a JSON object")
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        raise ValueError('a call must have a "name", a string')
    if not isinstance(arguments, dict):
        raise ValueError(f'a call must have "{key}", a JSON object')
    _check_levels(arguments, _LEVELS)
    call = {"name": name, "arguments": arguments}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    # No infinity, and no half of a surrogate pair, which nothing can encode.
    json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    return call


def _check_levels(value, levels):
    if levels == 0:
        raise RecursionError
    inner = value.values() if isinstance(value, dict) else value
    for item in inner if isinstance(value, (dict, list)) else ():
        _check_levels(item, levels - 1)


def parameters(tools, name):
    """Returns the schemas of a tool's parameters by their names."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def as_value(text, key, schema):
    """Reads the text of an XML parameter by its JSON schema."""
    types = set()
    for part in [schema, *schema.get("anyOf", ())]:
        own = part.get("type", ())
        types |= {own} if isinstance(own, str) else set(own)
    if schema.get("nullable"):
        types.add("null")
    # Templates write Python's words.
    word = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    if "string" in types and not (word == "null" and "null" in types):
        return text
    try:
        return json.loads(word)
    except (ValueError, RecursionError) as error:
        if not types:
            return text
        raise ValueError(
            f"the parameter {key!r} must be of type "
            + " or ".join(sorted(types))
        ) from error


def read_gemma4(text, at):
    """Reads a value in Gemma 4's notation; returns it and where it ends.

    Strings are between two marks and have no escapes; keys may be too.
    """
    return _Gemma4(text).value(at, _LEVELS)


class _Gemma4:
    """A reader of values; its methods return them and where they end."""

    quote = '<|"|>'
    plain = re.compile(r"[^,:{}\[\]<]*")

    def __init__(self, text):
        self.text = text

    def value(self, at, levels):
        if levels == 0:
            raise RecursionError
        at = SPACE.match(self.text, at).end()
        if self.text.startswith("{", at):
            return self.parts(at + 1, "}", levels - 1)
        if self.text.startswith("[", at):
            return self.parts(at + 1, "]", levels - 1)
        if self.text.startswith(self.quote, at):
            return self.string(at)
        word = self.plain.match(self.text, at)
        return self.literal(word[0].strip()), word.end()

    def parts(self, at, closing, levels):
        """Reads the pairs of a mapping, or the items of a list."""
        found = {} if closing == "}" else []
        at = SPACE.match(self.text, at).end()
        while not self.text.startswith(closing, at):
            if closing == "}":
                key, at = self.key(at)
                found[key], at = self.value(at, levels)
            else:
                item, at = self.value(at, levels)
                found.append(item)
            at = SPACE.match(self.text, at).end()
            if self.text.startswith(",", at):
                at += 1
            elif not self.text.startswith(closing, at):
                raise ValueError(f"`{closing}` or a comma must follow a value")
        return found, at + 1

    def key(self, at):
        at = SPACE.match(self.text, at).end()
        if self.text.startswith(self.quote, at):
            key, at = self.string(at)
        else:
            word = self.plain.match(self.text, at)
            key, at = word[0].strip(), word.end()
        if not key or not self.text.startswith(":", at):
            raise ValueError("each value must have a name and a colon")
        return key, at + 1

    def string(self, at):
        start = at + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise ValueError("a string has no end")
        return self.text[start:end], end + len(self.quote)

    def literal(self, word):
        known = {"true": True, "false": False, "null": None, "None": None}
        if word in known:
            return known[word]
        try:
            return json.loads(word)
        except ValueError:
            raise ValueError(
                f"strings must be between {self.quote} marks, but one is "
                f"{word[:40]!r}"
            ) from None


def read_python(code, tools):
    """Reads calls on lines, or in lists, whose values are literals."""
    code = _BACKSLASH.sub(lambda match: match[1] or r"\\", code.strip())
    calls = []
    for line in ast.parse(code).body:
        if not isinstance(line, ast.Expr):
            raise ValueError("only calls of functions are read")
        value = line.value
        is_list = isinstance(value, (ast.List, ast.Tuple))
        for call in value.elts if is_list else [value]:
            calls.append(_as_python_call(call, tools))
    if not calls:
        raise ValueError("it holds no call")
    return calls


class _JSONWords(ast.NodeTransformer):
    """Replaces the words of JSON that Python has no value for."""

    words = {"true": True, "false": False, "null": None}

    def visit_Name(self, node):
        if node.id not in self.words:
            return node
        return ast.copy_location(ast.Constant(self.words[node.id]), node)


_AS_JSON = _JSONWords()


def _as_python_call(node, tools):
    printed = isinstance(node, ast.Call) and len(node.args) == 1
    if printed and getattr(node.func, "id", None) == "print":
        [node] = node.args
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("only calls of functions by their names are read")
    name = node.func.id
    names = list(parameters(tools, name))[: len(node.args)]
    if len(names) < len(node.args):
        raise ValueError("arguments must be passed by name")
    pairs = [
        *zip(names, node.args),
        *((k.arg, k.value) for k in node.keywords),
    ]
    arguments = {}
    for key, value in pairs:
        if key is None or key in arguments:
            raise ValueError("each argument must be passed once, by name")
        try:
            arguments[key] = ast.literal_eval(_AS_JSON.visit(value))
        except ValueError as error:
            raise ValueError(f"the argument {key!r} is no literal") from error
    # Tuples become lists, as in the other formats.
    arguments = json.loads(json.dumps(arguments, allow_nan=False))
    return as_call({"name": name, "arguments": arguments})
