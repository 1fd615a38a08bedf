"""Rows in the formats of ShareGPT and Alpaca, as rows of this library."""

import json

# The roles of ShareGPT's `from`, and of its relatives.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
OWN = ("text", "messages", "prompt", "prompt_ids", "token_ids", "chosen_ids")
SIDES = ("chosen", "rejected")
# The prompts of the models that Alpaca's rows were written for.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}"
    "\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that "
    "provides further context. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
    "\n\n### Response:\n"
)


def convert(row, where, *, has_template, prompts=False):
    """Converts a row of ShareGPT's or Alpaca's format.

    - `{"conversations"}`, a list of `{"from", "value"}`, becomes
      `{"messages"}`; with `"chosen"` and `"rejected"` a pair after that
      conversation, with `"label"` a labelled completion.
    - `{"instruction", "input", "output"}` becomes a conversation too or,
      where the tokenizer has no chat template, Alpaca's own prompt as text
      and a completion. `"input"` may be missing or empty.

    Other columns are kept, and so are rows with columns of this library's
    own.

    Args:
        row: a row.
        where: string, the row in errors.
        has_template: bool, whether there is a chat template.
        prompts: bool, whether rows are prompts: of a conversation the part
            before the last answer.

    Returns:
        `(row, format)`: the row, and the name of the format it had, or
        `None`.

    Raises:
        ValueError: the row's values are not those of its format.
    """
    if not isinstance(row, dict):
        return row, None
    given = {column for column, value in row.items() if value is not None}
    if not given.isdisjoint(OWN):
        return row, None
    if "conversations" in given:
        return _conversation(row, where, prompts), "ShareGPT"
    answers = {"output", *SIDES} & given
    if "instruction" in given and (answers or prompts):
        return _instruction(row, where, has_template, prompts), "Alpaca"
    return row, None


def _conversation(row, where, prompts):
    turns = row["conversations"]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise _wrong(where, "conversations", turns)
    messages = [_message(x, where, "conversations") for x in turns]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    others = _without(row, "conversations", "system")
    if all(row.get(side) is not None for side in SIDES):
        sides = {s: [_message(row[s], where, s)] for s in SIDES}
        return others | {"prompt": messages} | sides
    return _finish(row, others, messages, prompts)


def _finish(row, others, messages, prompts):
    """Makes the row of a whole conversation."""
    split = len(messages)
    while split and messages[split - 1]["role"] == "assistant":
        split -= 1
    if prompts:
        return others | {"prompt": messages[:split]}
    if row.get("label") is not None:
        sides = {"prompt": messages[:split], "completion": messages[split:]}
        return others | sides
    return others | {"messages": messages}


def _message(turn, where, column):
    if isinstance(turn, str) and column in SIDES:
        return {"role": "assistant", "content": turn}
    if not isinstance(turn, dict):
        raise _wrong(where, column, turn)
    if "role" in turn:
        return dict(turn)
    if not {"from", "value"} <= set(turn):
        raise _wrong(where, column, turn)
    name, text = turn["from"], turn["value"]
    if name not in ROLES:
        raise ValueError(
            f"A turn of the column '{column}' must be from one of "
            f"{list(ROLES)}. Received: {where}, from={name!r:.200}."
        )
    if name == "function_call":
        return _call(text, where)
    return {"role": ROLES[name], "content": text}


def _call(text, where):
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        functions = [
            {"name": call["name"], "arguments": call["arguments"]}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(
            "A turn from 'function_call' must be JSON with 'name' and "
            f"'arguments'. Received: {where}, value={text!r:.200}."
        ) from error
    calls = [{"type": "function", "function": f} for f in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _instruction(row, where, has_template, prompts):
    columns = ("instruction", "input", "output", "system")
    values = {column: row.get(column) or "" for column in columns}
    for column, value in values.items():
        if not isinstance(value, str):
            raise ValueError(
                f"The column '{column}' must be a string, as in Alpaca. "
                f"Received: {where}, {column}={value!r:.200} of type "
                f"{type(value).__name__}."
            )
    # Rewards may compare with the answer.
    kept = ("output",) if prompts else ()
    others = _without(row, *(c for c in columns if c not in kept))
    prompt = _prompt(values, has_template)
    pair = all(row.get(side) is not None for side in SIDES)
    if prompts or pair:
        return others | {"prompt": prompt}
    if not has_template or row.get("label") is not None:
        sides = {"prompt": prompt, "completion": values["output"]}
        return others | sides
    answer = {"role": "assistant", "content": values["output"]}
    return others | {"messages": [*prompt, answer]}


def _prompt(values, has_template):
    if not has_template:
        template = ALPACA_WITH_INPUT if values["input"] else ALPACA
        text = template.format(
            instruction=values["instruction"], input=values["input"]
        )
        system = values["system"]
        return f"{system}\n\n{text}" if system else text
    parts = [values["instruction"], values["input"]]
    text = "\n\n".join(part for part in parts if part)
    messages = [{"role": "user", "content": text}]
    if values["system"]:
        messages.insert(0, {"role": "system", "content": values["system"]})
    return messages


def _without(row, *columns):
    return {k: v for k, v in row.items() if k not in columns}


def _wrong(where, column, value):
    return ValueError(
        f"The column '{column}' must hold turns with 'from' and 'value', as "
        f"in ShareGPT. Received: {where}, {column}={value!r:.200} of type "
        f"{type(value).__name__}."
    )
