"""Chat templates: what they render, and checks of what they are given."""

import dataclasses
import difflib
import functools
import json
import pathlib
import pickle
import re

from keras_posttrain.data.chat import sandbox
from keras_posttrain.workers.pool import Failure, Workers

# The roles that published templates know.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Names of the field of a turn's thoughts.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


# A template comes from a stranger's directory: it runs in a process of its
# own, where it has this time for a conversation and this much memory.
_SECONDS = 10.0
_BYTES = 2**29
_SANDBOX = pathlib.Path(__file__).with_name("sandbox.py")
_renderers = Workers((str(_SANDBOX), "renderer"), _SECONDS, _BYTES, count=1)


def render_in_this_process():
    """Renders without another process, in one whose time is bounded too."""
    global _renderers
    _renderers = _Here


class _Here:
    """Renders as `Workers` do, in this process."""

    call = staticmethod(sandbox.render)


class TemplateFault(ValueError):
    """A chat template that no row can be rendered with."""


def control_pattern(tokens):
    """Makes a regular expression that finds any of the control tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Cleaned messages, and all that a chat template renders them with.

    `chat.render` documents the fields.
    """

    tokenizer: object
    messages: list
    tools: list | None = None
    kwargs: dict = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = False

    def render(self, **changes):
        """Returns the text, with other values of some fields."""
        [text] = self.render_all([changes])
        return text

    def render_all(self, changes):
        """Renders several times in one call of the other process.

        Args:
            changes: list of dicts, other values of some fields.

        Returns:
            List of strings. All but the first are `None` where the template
            refuses.

        Raises:
            ValueError: there is no template, or it refuses the first.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(
                "Messages need a chat template, and this tokenizer has none. "
                "Received: chat_template=None. Pass `chat_template=` with a "
                "Jinja2 template, or use rows of text."
            )
        versions = [vars(self) | c for c in changes]
        results = _render(template, list(map(_variables, versions)))
        kind, text = results[0]
        if kind != "text":
            messages = versions[0]["messages"]
            roles = [message.get("role") for message in messages]
            raise ValueError(
                f"The chat template refuses these messages: {text}. "
                f"Received: roles={roles}. Change the messages, or pass "
                "another `chat_template=`."
            )
        return [text if kind == "text" else None for kind, text in results]

    @functools.cached_property
    def strings(self):
        """A list of all strings in messages and tools, dict keys included."""
        found = []
        _collect(self.messages, found)
        _collect(self.tools, found)
        return found


def _variables(fields):
    """Returns what the template may read of a `Conversation`'s fields."""
    return {
        "messages": fields["messages"],
        "tools": fields["tools"],
        "add_generation_prompt": fields["add_generation_prompt"],
        **fields["tokenizer"].special_tokens,
        **fields["kwargs"],
    }


def _collect(value, found):
    """Appends all strings in a value to a list."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, str):
                found.append(item)
            else:
                _collect(item, found)


def _render(template, conversations):
    """Renders a template with each of several dicts of variables.

    Returns:
        List of pairs, `"text"` and the text or `"refusal"` and its reason.
    """
    try:
        results = _renderers.call(
            template=template, conversations=conversations
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            "Messages, tools and the variables of a chat template must be "
            f"strings, numbers, lists and dicts. Received: {error}."
        ) from error
    if isinstance(results, Failure):
        return [("refusal", f"it {results}")] * len(conversations)
    kind, text = results[0]
    if kind == "fault":
        raise TemplateFault(
            f"The chat template is no valid Jinja2: {text}. Received: the "
            f"template that begins with {template[:60]!r}. Correct it, or "
            "pass another `chat_template=`."
        )
    return results


def check_template(template):
    """Raises a `ValueError` for a template that is no valid Jinja2.

    Args:
        template: string.
    """
    if not isinstance(template, str):
        raise TemplateFault(
            "`chat_template` must be a string, a Jinja2 template. Received: "
            f"chat_template={template!r}."
        )
    _render(template, [{"messages": []}])


def check_tools(conversation):
    """Raises where a template leaves out some of a conversation's tools.

    They get other names, which must appear: a tool's own name may also be in
    a message or in another tool.

    Args:
        conversation: `Conversation`.
    """
    if not conversation.tools:
        return
    marked, marks = [], {}
    for i, tool in enumerate(conversation.tools):
        mark = f"sentinel_{i}_tool"
        inner = tool.get("function")
        if isinstance(inner, dict):
            marked.append(tool | {"function": inner | {"name": mark}})
            marks[mark] = inner.get("name")
        else:
            marked.append(tool | {"name": mark})
            marks[mark] = tool.get("name")
    try:
        shown = conversation.render(tools=marked)
    except ValueError:
        # A template that refuses an unknown name has seen it.
        return
    missing = [name for mark, name in marks.items() if mark not in shown]
    if missing:
        template = conversation.tokenizer.chat_template
        raise ValueError(
            "The chat template does not render tools: the model would never "
            f"see them. Received: tools={missing}, and the template that "
            f"begins with {template[:60]!r}. Pass a `chat_template=` that "
            "reads `tools`, or remove them from the rows."
        )


def check_roles(messages, template):
    """Raises where a role is a misspelling of one that templates know.

    Args:
        messages: list of dicts, cleaned.
        template: string, the chat template; what it quotes is a role too.

    Raises:
        ValueError: such a message; its turn would not be trained on.
    """
    for i, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or repr(role) in template or f'"{role}"' in template:
            continue
        plain = role.strip().lower()
        close = difflib.get_close_matches(plain, ROLES, 1, cutoff=0.8)
        if close:
            raise ValueError(
                f"Did you mean the role {close[0]!r}? Received: message {i} "
                f"has role={role!r}."
            )


def clean_messages(messages):
    """Checks messages and drops the empty entries that tables fill in.

    Args:
        messages: list of dicts with `"role"` and `"content"`; an assistant's
            content may be missing where it has `"tool_calls"`.

    Returns:
        List of dicts.

    Raises:
        ValueError: not such a list.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(
            "Messages must be a non-empty list of dicts with `role` and "
            f"`content`. Received: {messages!r}."
        )
    cleaned = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(
                "A message must be a dict with `role` and `content`. "
                f"Received: message {i} is {message!r}."
            )
        message = {k: v for k, v in message.items() if v is not None}
        if not isinstance(message.get("role"), str):
            raise ValueError(
                "A message's `role` must be a string such as 'user' or "
                f"'assistant'. Received: message {i} has "
                f"role={message.get('role')!r}."
            )
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise ValueError(
                    "A message must have `content`. Received: message "
                    f"{i} has the keys {sorted(message)}."
                )
            message["content"] = ""
        elif not isinstance(content, (str, list, dict)):
            raise ValueError(
                "A message's `content` must be a string or a list of parts. "
                f"Received: message {i} has content={content!r}."
            )
        for name in THOUGHTS:
            if isinstance(message.get(name), str):
                message.setdefault("reasoning_content", message[name])
        if message.get("reasoning_content"):
            # The name that gpt-oss's template reads.
            message.setdefault("thinking", message["reasoning_content"])
        cleaned.append(message)
    return cleaned


def end_of_turn(tokenizer):
    """Finds the control token that ends an assistant's turn, or `None`.

    It is the first one after the words of a rendered assistant.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "reply-in-words"},
    ]
    try:
        text = Conversation(tokenizer, messages).render()
    except ValueError:
        return None
    at = text.rfind("reply-in-words")
    found = tokenizer.find_control_tokens(text[max(at, 0) :])
    if at < 0 or not found:
        return None
    start, end = found[0]
    return text[at + start : at + end]


def generation_prompt(tokenizer, kwargs):
    """Returns the text between the messages and the answer, or `""`."""
    key = json.dumps(kwargs, sort_keys=True, default=repr)
    cache = tokenizer.generation_prompts
    if key not in cache:
        cache[key] = _find_generation_prompt(tokenizer, kwargs)
    return cache[key]


def _find_generation_prompt(tokenizer, kwargs):
    messages = [{"role": "user", "content": "question"}]
    conversation = Conversation(tokenizer, messages, kwargs=kwargs)
    try:
        plain = conversation.render()
        prompted = conversation.render(add_generation_prompt=True)
    except ValueError:
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else ""
