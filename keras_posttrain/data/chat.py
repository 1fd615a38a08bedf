"""Chat templates: messages to text and tokens, and who wrote which part.

Templates are Jinja2 in a sandbox, with what `transformers` gives them. What a
message says stays text: a control token that is written in a message is never
parsed as one, while those that the template writes are.
"""

import datetime
import functools
import json
import re

import jinja2
import jinja2.ext
import jinja2.sandbox

# Private-use characters that mark places in a rendered text. They are taken
# out again, and a conversation that holds one is given others.
_PRIVATE_USE = range(0xF0000, 0xF1000)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: what the model writes."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), True)
        call = self.call_method("_mark", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, context, caller):
        start, end = context.get("generation_marks") or ("", "")
        return start + caller() + end


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
    # Jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=32)
def _compile(template):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


@functools.lru_cache(maxsize=32)
def control_pattern(tokens):
    """A regular expression that finds any of the control tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _call(tokenizer, messages, add_generation_prompt, tools, kwargs):
    if tokenizer.chat_template is None:
        raise ValueError(
            "Messages need a chat template, and this tokenizer has none. "
            "Received: chat_template=None. Pass `chat_template=` with a "
            "Jinja2 template, or use rows of text."
        )
    try:
        return _compile(tokenizer.chat_template).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **(tokenizer.special_tokens | kwargs),
        )
    except (jinja2.exceptions.TemplateError, TypeError) as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(
            f"The chat template refuses these messages: {error}. Received: "
            f"roles={roles}. Change the messages, or pass another "
            "`chat_template=`."
        ) from error


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
        # Older names of the field that templates read.
        for name in ("reasoning", "thinking"):
            if isinstance(message.get(name), str):
                message.setdefault("reasoning_content", message[name])
        cleaned.append(message)
    return cleaned


def render(
    tokenizer, messages, *, add_generation_prompt=False, tools=None, **kwargs
):
    """Renders messages with the tokenizer's chat template.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        add_generation_prompt: bool, whether the text ends where the model's
            turn begins.
        tools: list of dicts, the tools' JSON schemas, or `None`.
        **kwargs: further variables of the template, such as
            `enable_thinking=False`.

    Returns:
        String.

    Raises:
        ValueError: there is no template, or it refuses the messages.
    """
    messages = clean_messages(messages)
    return _call(tokenizer, messages, add_generation_prompt, tools, kwargs)


def render_ids(
    tokenizer, messages, *, add_generation_prompt=False, tools=None, **kwargs
):
    """Token ids of rendered messages.

    Control tokens inside the messages are encoded as text. Takes what
    `render` takes.

    Returns:
        List of ints.
    """
    messages = clean_messages(messages)
    text = _call(tokenizer, messages, add_generation_prompt, tools, kwargs)
    plain = _quoted(
        tokenizer, text, messages, add_generation_prompt, tools, kwargs
    )
    return tokenizer.encode_mixed(text, plain)[0]


def encode_with_spans(tokenizer, messages, *, tools=None, **kwargs):
    """Tokens of a conversation and what the assistant wrote of it.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        tools: list of dicts, or `None`.
        **kwargs: further variables of the template.

    Returns:
        Tuple `(ids, offsets, spans)`: a list of ints, a list of
        `(start, end)` in characters of the rendered text, and a list of
        `(start, end, message index)` in the same characters.

    Raises:
        ValueError: the template refuses the messages, or the assistant's
            turns cannot be found.
    """
    messages = clean_messages(messages)
    text, plain, spans = _text_and_spans(tokenizer, messages, tools, kwargs)
    return *tokenizer.encode_mixed(text, plain), spans


def render_with_spans(tokenizer, messages, *, tools=None, **kwargs):
    """Renders a conversation and says what the assistant wrote of it.

    A span is a turn's text up to and with the token that ends it. Text that
    the template puts after that token, such as a newline, is not in it.

    Args:
        tokenizer: a `Tokenizer`.
        messages: list of dicts with `"role"` and `"content"`.
        tools: list of dicts, or `None`.
        **kwargs: further variables of the template.

    Returns:
        Tuple `(text, spans)`: a string, and a list of `(start, end)` in its
        characters, one for each assistant turn (for each
        `{% generation %}` block where the template has them).

    Raises:
        ValueError: the template refuses the messages, or the assistant's
            turns cannot be found.
    """
    messages = clean_messages(messages)
    text, _, spans = _text_and_spans(tokenizer, messages, tools, kwargs)
    return text, [(start, end) for start, end, _ in spans]


def end_of_turn(tokenizer):
    """The control token that ends an assistant's turn, or `None`.

    Found by rendering a conversation: the first control token after the
    assistant's words.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "reply-in-words"},
    ]
    try:
        text = _call(tokenizer, messages, False, None, {})
    except ValueError:
        return None
    at = text.rfind("reply-in-words")
    found = tokenizer.find_control_tokens(text[max(at, 0) :])
    if at < 0 or not found:
        return None
    start, end = found[0]
    return text[at + start : at + end]


# Places of what the messages say ------------------------------------------


def _strings(value):
    """All strings in a message, but for its role and dict keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role":
                yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value, function):
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {
            key: item if key == "role" else _map_strings(item, function)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, function) for item in value]
    return value


def _marks(messages, tools, count):
    """Private-use characters that the conversation does not hold."""
    used = set().union(*map(set, _strings([messages, tools])), set())
    marks = []
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            marks.append(chr(code))
            if len(marks) == count:
                return marks
    raise ValueError(
        "Messages cannot use every private-use character of U+F0000 to "
        "U+F0FFF, of which some mark places in the text. Remove them."
    )


def _places(marked, text, marks):
    """Places of the marks in `text`, or `None` where they changed it."""
    places, pieces, length, at = [], [], 0, 0
    for i, character in enumerate(marked):
        if character in marks:
            pieces.append(marked[at:i])
            length += i - at
            at = i + 1
            places.append((length, character))
    pieces.append(marked[at:])
    return places if "".join(pieces) == text else None


def _quoted(tokenizer, text, messages, add_generation_prompt, tools, kwargs):
    """Places of control tokens that the messages wrote, not the template."""
    pattern = control_pattern(tuple(tokenizer.control_tokens))
    total = sum(
        len(pattern.findall(string)) for string in _strings([messages, tools])
    )
    if not total:
        return []
    before, after = marks = _marks(messages, tools, 2)

    def find(wanted, at_start):
        """Renders with marks at the wanted occurrences and reads them."""
        seen = -1

        def mark_match(match):
            nonlocal seen
            seen += 1
            if wanted is not None and seen != wanted:
                return match.group()
            # A mark must not stand where templates look for a prefix.
            if at_start or match.start() == 0:
                return match.group() + after
            return before + match.group()

        def mark(string):
            return pattern.sub(mark_match, string)

        marked = _call(
            tokenizer,
            _map_strings(messages, mark),
            add_generation_prompt,
            _map_strings(tools, mark),
            kwargs,
        )
        places = _places(marked, text, marks)
        if places is None:
            return None
        spans = []
        for place, character in places:
            if character == before:
                match = pattern.match(text, place)
                spans.append(match.span())
            else:
                spans += [s for s in found if s[1] == place]
        return spans

    found = tokenizer.find_control_tokens(text)
    spans = find(None, False)
    if spans is None:
        # The template reads what the messages say (Qwen 3 looks for the
        # thinking). One token at a time; what it takes apart and writes anew
        # is then its own.
        spans = []
        for wanted in range(total):
            for at_start in (False, True):
                one = find(wanted, at_start)
                if one is not None:
                    spans += one
                    break
    return sorted(set(spans))


# Places of the assistant's turns ------------------------------------------


def _text_and_spans(tokenizer, messages, tools, kwargs):
    marks = _marks(messages, tools, 2)
    marked = _call(
        tokenizer, messages, False, tools, kwargs | {"generation_marks": marks}
    )
    text = marked.replace(marks[0], "").replace(marks[1], "")
    plain = _quoted(tokenizer, text, messages, False, tools, kwargs)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if marked != text:
        return text, plain, _generation_spans(marked, text, marks, turns)
    quoted = set(plain)
    stops = [
        (start, end)
        for start, end in tokenizer.find_control_tokens(text)
        if (start, end) not in quoted
        and tokenizer.control_tokens[text[start:end]]
        in tokenizer.stop_token_ids
    ]
    spans, after = [], 0
    for i in turns:
        start = _turn_start(tokenizer, text, messages, i, after, tools, kwargs)
        end = _turn_end(
            tokenizer, text, messages, i, start, stops, tools, kwargs
        )
        if start < after or end <= start:
            raise _not_found(i)
        spans.append((start, end, i))
        after = end
    return text, plain, spans


def _not_found(i):
    return ValueError(
        "The text of an assistant's turn cannot be found in what the chat "
        f"template renders. Received: message {i}. Put the turn's text in "
        "the template between `{% generation %}` and `{% endgeneration %}`."
    )


def _generation_spans(marked, text, marks, turns):
    places = _places(marked, text, marks)
    starts = [place for place, mark in places if mark == marks[0]]
    ends = [place for place, mark in places if mark == marks[1]]
    if len(starts) != len(ends):
        raise ValueError(
            "The `{% generation %}` blocks of a chat template must not be cut "
            f"apart by filters. Received: {len(starts)} starts and "
            f"{len(ends)} ends in the rendered text."
        )
    # One block a turn is the rule; then each is known by its message.
    named = turns if len(turns) == len(starts) else [None] * len(starts)
    return [s for s in zip(starts, ends, named, strict=True) if s[0] < s[1]]


def _turn_start(tokenizer, text, messages, i, after, tools, kwargs):
    """Where the model takes over: the end of what it is prompted with."""
    header = _generation_prompt(tokenizer, kwargs)
    if i > 0:
        try:
            prompt = _call(tokenizer, messages[:i], True, tools, kwargs)
        except ValueError:
            # Some templates refuse to be asked for an answer here.
            prompt = None
        if prompt is not None and text.startswith(prompt):
            start = len(prompt)
            # A template that knows no generation prompt may still open the
            # turn with a header, which is not the model's to write.
            opens = control_pattern(tuple(tokenizer.control_tokens)).match
            if header or not opens(text, start):
                return start
    start, _ = _content_place(tokenizer, text, messages, i, tools, kwargs)
    at = text.rfind(header, after, start) if header else -1
    return at + len(header) if at >= 0 else start


def _generation_prompt(tokenizer, kwargs):
    """What the template puts before the model's words."""
    key = json.dumps(kwargs, sort_keys=True, default=repr)
    cache = tokenizer.generation_prompts
    if key not in cache:
        cache[key] = _find_generation_prompt(tokenizer, kwargs)
    return cache[key]


def _find_generation_prompt(tokenizer, kwargs):
    messages = [{"role": "user", "content": "question"}]
    try:
        plain = _call(tokenizer, messages, False, None, kwargs)
        prompted = _call(tokenizer, messages, True, None, kwargs)
    except ValueError:
        return ""
    return prompted[len(plain) :] if prompted.startswith(plain) else ""


def _content_place(tokenizer, text, messages, i, tools, kwargs):
    """Place of a turn's own words, by marks around them."""
    content = messages[i]["content"]
    core = content.strip() if isinstance(content, str) else ""
    if not core:
        raise _not_found(i)
    marks = _marks(messages, tools, 2)
    lead = len(content) - len(content.lstrip())
    tail = lead + len(core)
    # Templates may look at how the words begin: then only the end is marked.
    for opening in (marks[0], ""):
        marked = (
            content[:lead]
            + opening
            + content[lead:tail]
            + marks[1]
            + content[tail:]
        )
        changed = list(messages)
        changed[i] = messages[i] | {"content": marked}
        rendered = _call(tokenizer, changed, False, tools, kwargs)
        places = _places(rendered, text, marks)
        if places and len(places) == (2 if opening else 1):
            return places[0][0], places[-1][0]
    raise _not_found(i)


def _turn_end(tokenizer, text, messages, i, start, stops, tools, kwargs):
    """The end of the token that ends the turn."""
    limit = len(text)
    try:
        turn = _call(tokenizer, messages[: i + 1], False, tools, kwargs)
        if text.startswith(turn):
            limit = len(turn)
    except ValueError:
        pass
    for stop_start, stop_end in stops:
        if stop_start >= start and stop_end <= limit:
            return stop_end
    if i + 1 == len(messages) or limit < len(text):
        # No token ends a turn here: it ends where its text does.
        return limit
    raise _not_found(i)
