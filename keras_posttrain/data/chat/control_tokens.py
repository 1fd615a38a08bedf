"""Control tokens that a message quotes, which stay text."""

import bisect
import itertools

import tokenizers

# Private-use characters that mark places in a rendered text. They are removed
# again, and a conversation that contains one gets others.
_PRIVATE_USE = range(0xF0000, 0xF1000)


def _map_strings(value, function):
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {
            _map_strings(key, function): _map_strings(item, function)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, function) for item in value]
    return value


def free_marks(conversation):
    """Finds two private-use characters that a `Conversation` lacks."""
    strings = conversation.strings
    marks = list(map(chr, _PRIVATE_USE[:2]))
    joined = "".join(strings)
    if any(mark in joined for mark in marks):
        used = set().union(*strings)
        free = (c for c in map(chr, _PRIVATE_USE) if c not in used)
        marks = list(itertools.islice(free, 2))
    if len(marks) < 2:
        raise ValueError(
            "Messages cannot use every private-use character of U+F0000 to "
            "U+F0FFF, of which some mark places in the text. Remove them."
        )
    return marks


def mark_places(marked, text, marks):
    """Finds the marks in `text`; `None` where they changed it."""
    places, pieces, length, at = [], [], 0, 0
    for i, character in enumerate(marked):
        if character in marks:
            pieces.append(marked[at:i])
            length += i - at
            at = i + 1
            places.append((length, character))
    pieces.append(marked[at:])
    return places if "".join(pieces) == text else None


def quoted_places(conversation, text):
    """Finds the control tokens that messages, not the template, wrote."""
    tokenizer = conversation.tokenizer
    pattern = tokenizer.control_pattern
    strings = conversation.strings
    # Most conversations have none.
    if not pattern.search("\0".join(strings)):
        return []
    total = sum(len(pattern.findall(string)) for string in strings)
    before, after = marks = free_marks(conversation)

    def find(wanted, at_start):
        """Renders with marks at the wanted occurrences and reads them."""
        seen = -1

        def mark_match(match):
            nonlocal seen
            seen += 1
            if wanted is not None and seen != wanted:
                return match.group()
            # A mark must not be where templates look for a prefix.
            if at_start or match.start() == 0:
                return match.group() + after
            return before + match.group()

        def mark(string):
            return pattern.sub(mark_match, string)

        marked = conversation.render(
            messages=_map_strings(conversation.messages, mark),
            tools=_map_strings(conversation.tools, mark),
        )
        places = mark_places(marked, text, marks)
        if places is None:
            return None
        spans = []
        for place, character in places:
            if character == before:
                match = pattern.match(text, place)
                if match is None:
                    # The template stripped what is between them.
                    return None
                spans.append(match.span())
            else:
                spans += [s for s in found if s[1] == place]
        return spans

    found = tokenizer.find_control_tokens(text)
    spans = find(None, False)
    if spans is None:
        # The template reads the content of messages (Qwen 3 looks for the
        # thinking). Tokens are tried one at a time; those that it takes apart
        # and writes again count as the template's.
        spans = []
        for wanted in range(total):
            for at_start in (False, True):
                one = find(wanted, at_start)
                if one is not None:
                    spans += one
                    break
    return sorted(set(spans))


class QuotingEncoder:
    """Encodes texts in which some control tokens are plain text.

    Control tokens that are to be parsed are replaced by private-use
    characters, which are added tokens of a copy of the tokenizer; that copy
    reads all control tokens as text. So a text is still encoded in one call,
    and its words are split as usual.
    """

    def __init__(self, backend, control_tokens, pattern):
        self.backend = backend
        self.control_tokens, self.pattern = control_tokens, pattern
        # The characters of control tokens, and a copy that knows them. They
        # are replaced together: several threads may encode.
        self._known = {}, None

    def encode(self, text, plain):
        """Encodes a text; see `Tokenizer.encode_mixed`."""
        plain = set(plain)
        found = [
            match.span()
            for match in self.pattern.finditer(text)
            if match.span() not in plain
        ]
        aliases, backend = self._backend_of(
            dict.fromkeys(text[start:end] for start, end in found)
        )
        for alias in aliases.values():
            if alias in text:
                raise ValueError(
                    "A message that quotes control tokens cannot hold the "
                    f"private-use character U+{ord(alias):X} too. Received: "
                    f"text={text!r}. Remove it from the row."
                )
        pieces, ends, shift, at, length = [], [], [], 0, 0
        for start, end in found:
            pieces += [text[at:start], aliases[text[start:end]]]
            length += start - at + 1
            ends.append(length)
            shift.append(end - length)
            at = end
        pieces.append(text[at:])
        encoding = backend.encode("".join(pieces), add_special_tokens=False)
        back = {
            backend.token_to_id(alias): self.control_tokens[token]
            for token, alias in aliases.items()
        }
        ids = [back.get(i, i) for i in encoding.ids]
        place = _unshift(ends, shift)
        offsets = [
            (place(start), place(end)) for start, end in encoding.offsets
        ]
        for i, (start, end) in zip(ids, offsets, strict=True):
            token = text[start:end]
            if (start, end) in plain and self.control_tokens[token] == i:
                raise ValueError(
                    "A message quotes a control token that this tokenizer "
                    f"cannot write as text. Received: {token!r}. Remove it "
                    "from the row."
                )
        return ids, offsets

    def _backend_of(self, tokens):
        """Returns characters for at least these tokens, and the copy."""
        aliases, backend = self._known
        if backend is not None and aliases.keys() >= tokens.keys():
            return aliases, backend
        aliases = aliases | tokens
        aliases = {t: chr(0x10F000 + i) for i, t in enumerate(aliases)}
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        known = self.backend.get_added_tokens_decoder()
        backend.add_tokens(
            [
                tokenizers.AddedToken(
                    alias,
                    special=False,
                    normalized=False,
                    lstrip=known[self.control_tokens[token]].lstrip,
                    rstrip=known[self.control_tokens[token]].rstrip,
                )
                for token, alias in aliases.items()
            ]
        )
        self._known = aliases, backend
        return aliases, backend


def _unshift(ends, shift):
    """Maps offsets after the replacements back to those in the text."""

    def place(index):
        i = bisect.bisect_right(ends, index)
        return index + (shift[i - 1] if i else 0)

    return place
