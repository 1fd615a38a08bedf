"""Sampled turns as messages, with the calls of tools in them."""

import dataclasses
import json

from keras_posttrain.episodes import calls
from keras_posttrain.episodes.chat import Reply


@dataclasses.dataclass(frozen=True, eq=False)
class TurnReader:
    """Reads sampled turns.

    Attributes:
        tokenizer: `Tokenizer`.
        kwargs: dict, further variables of the chat template.
    """

    tokenizer: object
    kwargs: dict
    # Formats of calls by the text of tools.
    _formats: dict = dataclasses.field(default_factory=dict)

    def format(self, tools):
        """Returns the format in which the model writes calls of tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._formats:
            self._formats[key] = calls.choose(
                self.tokenizer, tools, self.kwargs
            )
        return self._formats[key]

    def read(self, token_ids, tools, until=()):
        """Returns the `Reply` of a sampled turn.

        Args:
            token_ids: list of ints.
            tools: list of dicts, the schemas that the model was shown, or
                `None`.
            until: strings; the turn's text ends before the first of them.
        """
        tokenizer = self.tokenizer
        text = _before(tokenizer.decode(token_ids), until)
        found, unreadable = [], []
        if tools:
            turn = _before(calls.decode_turn(tokenizer, token_ids), until)
            parsed = self.format(tools)(turn, tools)
            if parsed.calls or parsed.unreadable:
                text = parsed.content
            found, unreadable = parsed.calls, parsed.unreadable
        message = {"role": "assistant", "content": text}
        if found:
            message["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": c["id"]} if c.get("id") else {}),
                    "function": {
                        "name": c["name"],
                        "arguments": c["arguments"],
                    },
                }
                for c in found
            ]
        return Reply(text, message, found, unreadable)


def _before(text, until):
    for end in until:
        text = text.split(end)[0]
    return text
