"""The spans of a rendered conversation that the assistant wrote."""

import bisect
import itertools
import json
import math

from keras_posttrain.data.chat.control_tokens import (
    free_marks,
    mark_places,
    quoted_places,
)
from keras_posttrain.data.chat.template import THOUGHTS, generation_prompt

# Turns for which to render what precedes each of them is faster.
FEW_TURNS = 2
# Turns of a kind that are compared before it is known where such turns are.
TRUSTED = 8
# The most characters of what a template writes around the words of a turn of
# a kind that is known.
MAX_AROUND = 100


def text_and_spans(conversation):
    """Finds the assistant's text in a rendered `Conversation`.

    A span is a turn's text up to and with the token that ends it. Text that
    the template puts after that token, such as a newline, is not in it.

    Returns:
        Tuple `(text, plain, spans)`: the text, the places of quoted control
        tokens in it, and a list of `(start, end, message index)`, one for
        each assistant turn (for each `{% generation %}` block where the
        template has them).
    """
    messages, marks = conversation.messages, free_marks(conversation)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    with_marks = {"kwargs": conversation.kwargs | {"generation_marks": marks}}
    marked = None
    if len(turns) > FEW_TURNS:
        marked = _all_marked(conversation, turns, marks)
    if marked is None:
        more = _beginnings(messages, turns)
        if turns and turns[-1] + 1 == len(messages):
            # With its last turn it is the conversation itself.
            more.pop()
    else:
        more = [{"messages": marked}]
    rendered, *more = conversation.render_all([with_marks, *more])
    text = rendered.replace(marks[0], "").replace(marks[1], "")
    plain = quoted_places(conversation, text)
    if rendered != text:
        return text, plain, _generation_spans(rendered, text, marks, turns)
    search = _Search(conversation, text, plain)
    if marked is None:
        beginnings = dict(zip(turns, _pairs([*more, text])))
        return text, plain, search.spans(beginnings, turns)
    return text, plain, search.marked_spans(turns, more[0], marks)


def _beginnings(messages, turns):
    """Returns what to render: the conversation before each turn, and with it.

    It is a list of two dicts a turn, for `Conversation.render_all`.
    """
    return [
        change
        for i in turns
        for change in (
            {"messages": messages[:i], "add_generation_prompt": True},
            {"messages": messages[: i + 1]},
        )
    ]


def _pairs(values):
    return list(zip(values[::2], values[1::2]))


def _all_marked(conversation, turns, marks):
    """Returns messages with marks in the assistant's turns.

    They are around its content, or before the name of the first tool. It is
    `None` where that could not say where a turn begins.
    """
    if not generation_prompt(conversation.tokenizer, conversation.kwargs):
        return None
    out = list(conversation.messages)
    for i in turns:
        message = out[i]
        content, calls = message["content"], message.get("tool_calls")
        if _has_words(message):
            lead, core, tail = _parts(content)
            content = f"{lead}{marks[0]}{core}{marks[1]}{tail}"
            out[i] = message | {"content": content}
        elif calls:
            out[i] = message | {"tool_calls": _marked(calls, marks[0])}
    return None if out == list(conversation.messages) else out


class _Search:
    """The search for turns in a rendered conversation without blocks."""

    def __init__(self, conversation, text, plain):
        self.conversation, self.text = conversation, text
        tokenizer, quoted = conversation.tokenizer, set(plain)
        # The tokens that end a turn, `(start, end)`.
        self.stops = [
            (start, end)
            for start, end in tokenizer.find_control_tokens(text)
            if (start, end) not in quoted
            and tokenizer.control_tokens[text[start:end]]
            in tokenizer.stop_token_ids
        ]

    def spans(self, beginnings, turns, guesses=None):
        """Returns the spans of turns, in order.

        Args:
            beginnings: dict, for a turn the two texts of `_beginnings`.
            turns: list of indices of messages.
            guesses: dict, `(span, kind)` of turns without beginnings.
        """
        conversation, text = self.conversation, self.text
        found, after = [], 0
        for i in turns:
            if i in beginnings:
                opens_at, closes_at = (
                    _length_of(beginning, text) for beginning in beginnings[i]
                )
                if closes_at is None:
                    closes_at = _end_inside(conversation, text, i)
                start = _turn_start(conversation, text, i, after, opens_at)
                end = _turn_end(
                    conversation, text, i, start, self.stops, closes_at
                )
            else:
                (start, end), _ = guesses[i]
            if start < after or end <= start:
                raise _not_found(i)
            found.append((start, end, i))
            after = end
        return found

    def marked_spans(self, turns, marked, marks):
        """Returns the spans of turns whose beginnings are not all rendered.

        To render the conversation before each turn takes a time that grows
        with the square of their number. One rendering with marks says where
        the turns are. That is compared with the beginnings until it has
        agreed for `TRUSTED` turns of a kind, among them the first and the
        last of each conversation. Where it did not agree, each turn of its
        kind has its beginnings rendered.
        """
        messages = self.conversation.messages
        known = self.conversation.tokenizer.turn_kinds
        guesses = self._guesses(turns, marked, marks)
        kinds = {}
        for i, (_, kind) in guesses.items():
            kinds.setdefault(kind, []).append(i)
        wanted = {i for i in turns if i not in guesses}
        for kind, members in kinds.items():
            if known.get(kind, 0) < TRUSTED:
                wanted |= {members[0], members[-1]}
        beginnings = {}
        while True:
            new = sorted(wanted - beginnings.keys())
            if new:
                texts = _renderings(
                    self.conversation, _beginnings(messages, new)
                )
                beginnings |= zip(new, _pairs(texts))
            spans = self.spans(beginnings, turns, guesses)
            for start, end, i in spans:
                if i in guesses and guesses[i][0] != (start, end):
                    wanted |= set(kinds[guesses[i][1]])
            if wanted <= beginnings.keys():
                break
        for start, end, i in spans:
            if i in guesses and i in beginnings:
                span, kind = guesses[i]
                agrees = 1 if span == (start, end) else -math.inf
                known[kind] = known.get(kind, 0) + agrees
        return spans

    def _guesses(self, turns, marked, marks):
        """Returns a dict of `(span, kind)` of the turns that have marks."""
        text, conversation = self.text, self.conversation
        places = mark_places(marked, text, marks) if marked else None
        if places is None:
            return {}
        header = generation_prompt(conversation.tokenizer, conversation.kwargs)
        settings = json.dumps(
            conversation.kwargs, sort_keys=True, default=repr
        )
        places, found, after = iter(places), {}, 0
        for i in turns:
            message = conversation.messages[i]
            has_calls = bool(message.get("tool_calls"))
            count = 2 if _has_words(message) else has_calls
            own = list(itertools.islice(places, count))
            if "".join(mark for _, mark in own) != "".join(marks[:count]):
                return {}
            if not own:
                continue
            (first, _), (last, _) = own[0], own[-1]
            at = text.find(header, after, first)
            is_clear = at >= 0 and text.rfind(header, after, first) == at
            k = bisect.bisect_left(self.stops, (last, 0))
            if not is_clear or k == len(self.stops):
                continue
            start, end = at + len(header), self.stops[k][1]
            before = text[start:first]
            behind = "" if has_calls else text[last:end]
            if len(before) + len(behind) <= MAX_AROUND:
                kind = _kind(conversation.messages, i)
                kind = settings, *kind, before, behind, _blanks(message)
                found[i] = (start, end), kind
                after = end
        return {} if next(places, None) else found


def _has_words(message):
    content = message["content"]
    return isinstance(content, str) and bool(content.strip())


def _parts(content):
    """Splits a string into its words and the blanks around them."""
    core = content.strip()
    lead = len(content) - len(content.lstrip())
    return content[:lead], core, content[lead + len(core) :]


def _blanks(message):
    """Returns the blanks around a message's words."""
    lead, _, tail = _parts(message["content"] if _has_words(message) else "")
    return lead, tail


def _kind(messages, i):
    """Returns what a template may make a difference of between turns."""
    around = messages[max(i - 1, 0) : i + 2]
    return (
        i == 0,
        *((m["role"], _has_words(m), tuple(sorted(m))) for m in around),
    )


def _not_found(i):
    return ValueError(
        "The text of an assistant's turn cannot be found in what the chat "
        f"template renders. Received: message {i}. Put the turn's text in "
        "the template between `{% generation %}` and `{% endgeneration %}`."
    )


def _generation_spans(marked, text, marks, turns):
    places = mark_places(marked, text, marks)
    starts = [place for place, mark in places if mark == marks[0]]
    ends = [place for place, mark in places if mark == marks[1]]
    if len(starts) != len(ends):
        raise ValueError(
            "The `{% generation %}` blocks of a chat template must not be cut "
            f"apart by filters. Received: {len(starts)} starts and "
            f"{len(ends)} ends in the rendered text."
        )
    # With one block a turn each block belongs to a known message.
    named = turns if len(turns) == len(starts) else [None] * len(starts)
    return [s for s in zip(starts, ends, named, strict=True) if s[0] < s[1]]


def _length_of(beginning, text):
    """Returns the length of the beginning of a text that is rendered alone.

    `None` where the template refuses to end there, or writes something else.
    """
    is_there = beginning is not None and text.startswith(beginning)
    return len(beginning) if is_there else None


def _end_inside(conversation, text, i):
    """Finds the end of a turn that a template ends otherwise if it is last.

    Harmony has `<|return|>` at the end of a conversation and `<|end|>` inside.
    The model ends its turns with the former, so that the latter is left out.
    """
    tokenizer, messages = conversation.tokenizer, conversation.messages
    header = generation_prompt(tokenizer, conversation.kwargs)
    if i + 1 == len(messages) or not header:
        return None
    [beginning] = _renderings(
        conversation,
        [{"messages": messages[: i + 1], "add_generation_prompt": True}],
    )
    end = _length_of(beginning and beginning.removesuffix(header), text)
    for start, stop in tokenizer.find_control_tokens(text):
        if stop == end:
            token = tokenizer.control_tokens[text[start:stop]]
            return end if token in tokenizer.stop_token_ids else start
    return end


def _renderings(conversation, changes):
    """Renders several times, `None` where the template refuses."""
    return conversation.render_all([{}, *changes])[1:]


def _turn_start(conversation, text, i, after, start):
    """Finds where a turn begins: the end of its generation prompt.

    Args:
        conversation, text, i: as in `text_and_spans`.
        after: int, where the turn before ends.
        start: int, the length of what is rendered for the model to continue,
            or `None`.
    """
    tokenizer = conversation.tokenizer
    header = generation_prompt(tokenizer, conversation.kwargs)
    if i > 0:
        # A template without a generation prompt may still open the turn with
        # a header, which is not the model's to write.
        opens = tokenizer.control_pattern.match
        if start is not None and (header or not opens(text, start)):
            return start
    first = _first_place(conversation, text, i) if start is None else None
    try:
        start, end = _content_place(conversation, text, i)
    except ValueError:
        if first is not None:
            start, end = None, first
        elif start is None or not conversation.messages[i].get("tool_calls"):
            raise
        else:
            # Nothing is before the call: its mark is the model's to write.
            return start
    limit = end if start is None else start
    # A turn may have a header for its thoughts and one for its words.
    limit = limit if first is None else min(first, limit)
    at = text.rfind(header, after, limit)
    if header and at >= 0:
        return at + len(header)
    if start is None:
        raise _not_found(i)
    # Without a generation prompt the model writes the space before its words.
    while not header and start > after and text[start - 1] == " ":
        start -= 1
    return start


def _first_place(conversation, text, i):
    """Finds where a turn's thoughts or its calls begin, by marks.

    Returns the place in the text, or `None` where it has neither.
    """
    message, marks = conversation.messages[i], free_marks(conversation)
    versions = []
    if thoughts := {
        name: marks[0] + message[name].lstrip()
        for name in THOUGHTS
        if isinstance(message.get(name), str)
    }:
        versions.append(thoughts)
    if calls := message.get("tool_calls"):
        versions.append({"tool_calls": _marked(calls, marks[0])})
    if not versions:
        return None
    changes = []
    for fields in versions:
        changed = list(conversation.messages)
        changed[i] = message | fields
        changes.append({"messages": changed})
    found = []
    for rendered in _renderings(conversation, changes):
        places = rendered and mark_places(rendered, text, marks)
        found += [place for place, _ in places or ()]
    return min(found, default=None)


def _marked(calls, mark):
    """Returns tool calls with a mark before the name of the first."""
    call = calls[0]
    if isinstance(call.get("function"), dict):
        inner = call["function"]
        call = call | {"function": inner | {"name": mark + inner["name"]}}
    else:
        call = call | {"name": mark + call["name"]}
    return [call, *calls[1:]]


def _content_place(conversation, text, i):
    """Finds a turn's content by marks around it.

    The start is `None` where the template depends on how the content begins.
    """
    messages = conversation.messages
    content = messages[i]["content"]
    if not _has_words(messages[i]):
        raise _not_found(i)
    marks, (lead, core, tail) = free_marks(conversation), _parts(content)
    for opening in (marks[0], ""):
        marked = f"{lead}{opening}{core}{marks[1]}{tail}"
        changed = list(messages)
        changed[i] = messages[i] | {"content": marked}
        rendered = conversation.render(messages=changed)
        places = mark_places(rendered, text, marks)
        found = "".join(mark for _, mark in places or [])
        if found and found == opening + marks[1]:
            return places[0][0] if opening else None, places[-1][0]
    raise _not_found(i)


def _turn_end(conversation, text, i, start, stops, turn):
    """Finds the end of the token that ends the turn.

    `turn` is the length of the conversation up to the turn, or `None`.
    """
    limit = len(text)
    is_last = i + 1 == len(conversation.messages)
    if not is_last:
        limit = limit if turn is None else turn
    for stop_start, stop_end in stops:
        if stop_start >= start and stop_end <= limit:
            return stop_end
    if is_last or limit < len(text):
        # No token ends a turn here; it ends with its text.
        return limit
    raise _not_found(i)
