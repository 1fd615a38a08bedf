"""The tokens that a chat template writes around the model's own turns.

A conversation's ids only ever grow: what the model sampled stays as it is,
and only what is said to it is encoded.
"""

import itertools

from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.control_tokens import quoted_places
from keras_posttrain.data.chat.template import (
    Conversation,
    check_roles,
    check_tools,
    clean_messages,
)

_SAID = "What is said to the model"
_REFUSED = (
    "The chat template cannot say something with role={!r} after the model's "
    "turn: {} {}, or pass another `chat_template=`."
)


class Bridges:
    """What a chat template writes around the turns that the model samples.

    What comes between two sampled turns is read from a dummy conversation:
    the text behind a dummy turn of the model. It includes what the model
    never samples, such as the newline after Qwen's `<|im_end|>`.

    Args:
        tokenizer: a `Tokenizer` with a chat template.
        kwargs: dict, further variables of the template, or `None`.

    Attributes:
        end_of_turn_id: int, the control token that ends the model's turn, or
            `None` where the template has none; then `check` raises.

    Example:

    ```python
    bridges = Bridges(tokenizer)
    bridges.check()
    ids = bridges.opening([{"role": "user", "content": "Guess."}])
    ids += sampled  # ends with `bridges.end_of_turn_id`
    ids += bridges.between([{"role": "user", "content": "higher"}])
    ```
    """

    def __init__(self, tokenizer, kwargs=None):
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        self.end_of_turn_id = tokenizer.control_tokens.get(
            tokenizer.end_of_turn
        )
        self._end_before_tools = None

    def opening(self, messages, tools=None):
        """Encodes the beginning of a conversation.

        Args:
            messages: list of dicts with `"role"` and `"content"`.
            tools: list of dicts, the tools' JSON schemas, or `None`.

        Returns:
            List of ints, up to where the model's turn begins.

        Raises:
            ValueError: the template refuses the messages, or does not render
                the tools.
        """
        return chat.render_ids(
            self.tokenizer,
            messages,
            add_generation_prompt=True,
            tools=tools,
            **self.kwargs,
        )

    def between(self, messages, tools=None, calls=None):
        """Encodes what is said after a sampled turn.

        Args:
            messages: list of dicts, what is said.
            tools: list of dicts, or `None`. Mistral's templates write them
                before each user turn.
            calls: list of dicts with `"name"` and maybe `"id"`, the tool
                calls of the sampled turn, which the messages of the role
                `"tool"` answer in this order; `None` where these messages
                name their calls, or the template needs no names.

        Returns:
            List of ints, from behind the token that ends the sampled turn up
            to where the model's next turn begins.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._encode(*self._render(messages, tools, calls))

    def continues(self, text_so_far, messages, tools=None):
        """Renders a whole conversation that extends a text.

        Args:
            text_so_far: string, the conversation up to the end of a sampled
                turn, as the model saw it.
            messages: list of dicts, the whole conversation.
            tools: list of dicts, or `None`.

        Returns:
            String, what the template writes behind that text, up to where
            the model's next turn begins; `None` where it writes another
            beginning, such as one without the thoughts of earlier turns.
        """
        rendered = self._extend(text_so_far, messages, tools)
        return None if rendered is None else rendered[1][len(text_so_far) :]

    def continued_ids(self, text_so_far, messages, tools=None):
        """Encodes what `continues` returns: a list of ints, or `None`."""
        rendered = self._extend(text_so_far, messages, tools)
        return None if rendered is None else self._encode(*rendered)

    def check(self, roles=("user",), tools=None):
        """Checks that the template can be bridged.

        Args:
            roles: iterable of strings, the roles of what will be said.
            tools: list of dicts, or `None`.

        Raises:
            ValueError: the template does not end the model's turn with a
                control token, does not render the tools, refuses a role,
                changes what is said, parses control tokens in it, or writes
                something else after other turns.
        """
        if self.end_of_turn_id is None:
            raise self._unfit("must end the model's turn with a control token")
        self.opening([{"role": "user", "content": _SAID}], tools)
        for role in dict.fromkeys(["user", *roles]):
            self._check_role(role, tools)

    def end_before(self, messages, tools=None, calls=None):
        """Returns the token that ends a sampled turn before these messages.

        It is `end_of_turn_id`, but for templates in which tools answer inside
        the model's turn, such as that of Gemma 4.

        Args:
            messages, tools, calls: as in `between`.
        """
        if messages[0]["role"] != "tool":
            return self.end_of_turn_id
        if self._end_before_tools is None:
            try:
                _, text, start = self._render(messages, tools, calls)
            except ValueError:
                # Without `check`, templates may leave turns out.
                return self.end_of_turn_id
            self._end_before_tools = self._control_token(text, start)
        return self._end_before_tools

    def _check_role(self, role, tools):
        said = [{"role": role, "content": _SAID}]
        end = self.tokenizer.end_of_turn
        quote = [{"role": role, "content": f"{_SAID} {end}"}]
        try:
            texts = [self._render(said, tools, None, n)[1:] for n in (1, 2)]
        except ValueError as error:
            fix = "Say it with another role"
            if role == "tool":
                fix = "Use `Tools(as_user=True)`, which answers as the user"
            raise ValueError(_REFUSED.format(role, error, fix)) from error
        frames = [text[start:] for text, start in texts]
        if role != "tool" and not all(
            text[:start].endswith(end) for text, start in texts
        ):
            raise self._unfit(f"must end each of the model's turns with {end}")
        if frames[0] != frames[1]:
            raise self._unfit(
                "must write the same between two turns whatever came before",
                f"it writes {frames[0]!r} after one turn, {frames[1]!r} after "
                "two",
            )
        if _SAID not in frames[0]:
            raise self._unfit(
                "must write what is said unchanged",
                f"it writes {frames[0]!r} for role={role!r}, "
                f"content={_SAID!r}",
            )
        known = set(self.tokenizer.control_tokens.values())
        plain, quoted = (
            [i for i in self.between(messages, tools) if i in known]
            for messages in (said, quote)
        )
        if plain != quoted:
            raise self._unfit(
                "must leave control tokens that a message quotes as text",
                f"{end!r} in a message of role={role!r} is parsed",
            )

    def _unfit(self, rule, received=None):
        template = self.tokenizer.chat_template or ""
        received = received or f"it begins with {template[:60]!r}"
        return ValueError(
            f"For conversations of several turns the chat template {rule}. "
            f"Received: {received}. Pass another `chat_template=`."
        )

    def _conversation(self, messages, tools):
        messages = clean_messages(messages)
        check_roles(messages, self.tokenizer.chat_template or "")
        return Conversation(self.tokenizer, messages, tools, self.kwargs, True)

    def _extend(self, text_so_far, messages, tools):
        """Returns the arguments of `_encode`; `None` if it is no extension."""
        conversation = self._conversation(messages, tools)
        text = conversation.render()
        check_tools(conversation)
        if not text.startswith(text_so_far):
            return None
        return conversation, text, len(text_so_far)

    def _render(self, messages, tools, calls, turns=1):
        """Renders messages after a dummy conversation of some turns.

        Returns:
            Tuple `(conversation, text, start)`: a `Conversation`, its text,
            and the place in it behind the model's last dummy turn.
        """
        messages, calls = _linked(clean_messages(messages), calls)
        everything = str([messages, calls, tools])
        word = next(
            word
            for word in map("reply{}".format, itertools.count())
            if word not in everything
        )

        def dummy(calls):
            turn = {"role": "assistant", "content": "" if calls else word}
            if calls:
                # Templates leave out the content of such a turn, or put it
                # behind what the tools say.
                arguments = {"word": word}
                turn["tool_calls"] = [
                    {
                        "type": "function",
                        "id": identifier,
                        "function": {"name": name, "arguments": arguments},
                    }
                    for name, identifier in calls
                ]
            before = [
                {"role": "user", "content": "question"},
                {"role": "assistant", "content": "answer"},
            ] * turns
            conversation = self._conversation(
                [*before[:-1], turn, *messages], tools
            )
            return conversation, conversation.render()

        try:
            conversation, text = dummy(calls)
        except ValueError:
            if len(calls) < 2:
                raise
            # Llama's templates have one call a turn, and any results.
            conversation, text = dummy(calls[:1])
        return conversation, text, self._end_of(word, text)

    def _control_token(self, text, end):
        """Returns the id of the control token that ends at a place."""
        [found] = [
            text[start:stop]
            for start, stop in self.tokenizer.find_control_tokens(text)
            if stop == end
        ]
        return self.tokenizer.control_tokens[found]

    def _end_of(self, word, text):
        """Finds the end of the turn whose last word is `word`."""
        at = text.rfind(word)
        for start, end in self.tokenizer.find_control_tokens(text):
            token = self.tokenizer.control_tokens[text[start:end]]
            if start > at >= 0 and token in self.tokenizer.stop_token_ids:
                return end
        raise self._unfit("must write the model's turns and end them")

    def _encode(self, conversation, text, start):
        """Encodes the text from `start` on.

        The control token in front of it is encoded too: SentencePiece puts a
        space before a text, and splits hang on what is before them.
        """
        plain = quoted_places(conversation, text)
        before = [
            token
            for token in self.tokenizer.find_control_tokens(text)
            if token[1] == start
        ]
        at = before[0][0] if before else start
        plain = [(i - at, j - at) for i, j in plain if i >= start]
        ids, _ = self.tokenizer.encode_mixed(text[at:], plain)
        return ids[len(before) :]


def _linked(messages, calls):
    """Gives messages of the role `"tool"` the names and ids of their calls.

    Returns:
        Tuple `(messages, calls)`: copies, and `(name, id)` of a call for each
        such message.
    """
    calls, linked, messages = iter(calls or ()), [], list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            call = next(calls, {})
            # Mistral's templates want nine letters and digits.
            own = f"call{len(linked):05d}"
            name = message.get("name") or call.get("name") or "tool"
            own = message.get("tool_call_id") or call.get("id") or own
            messages[i] = message | {"name": name, "tool_call_id": own}
            linked.append((name, own))
    return messages, linked
