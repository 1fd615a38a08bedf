"""One tokenizer for all presets: ids, offsets, stop tokens, chat template."""

import os
import pathlib

import tokenizers

from keras_posttrain.data.chat import (
    control_tokens,
    conversion,
    tokenizer_files,
)
from keras_posttrain.data.chat.template import (
    check_template,
    control_pattern,
    end_of_turn,
)


class Tokenizer:
    """A text tokenizer with its special tokens and chat template.

    It wraps a `tokenizers.Tokenizer`, so every token comes with its offsets
    in the text, and gives the ids that `transformers` gives for the same
    directory. Make one with `from_directory` or `from_keras_hub`.

    Args:
        backend: a `tokenizers.Tokenizer`.
        special_tokens: dict of names such as `"bos_token"`, `"eos_token"` and
            `"pad_token"` to strings. Chat templates see them under these
            names.
        chat_template: string, a Jinja2 template, or `None`.
        stop_token_ids: iterable of ints, ids that end a completion in addition
            to the end token and the chat template's end of turn.
        source: path of the directory it was read from, or `None`.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        bos_token_id: int or `None`.
        eos_token_id: int or `None`.
        pad_token_id: int; the end token's where there is no padding token.
        stop_token_ids: sorted tuple of ints.
        chat_template: string or `None`.
        vocabulary_size: int, added tokens included.

    Example:

    ```python
    tokenizer = kpt.Tokenizer.from_directory(preset)
    ids, offsets = tokenizer.encode_with_offsets("Hello world")
    tokenizer.decode(ids)  # "Hello world"
    ```
    """

    def __init__(
        self,
        backend,
        special_tokens=None,
        chat_template=None,
        stop_token_ids=(),
        source=None,
    ):
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(
                "`backend` must be a `tokenizers.Tokenizer`. Received: "
                f"backend={backend!r}. Use `Tokenizer.from_directory(path)` "
                "for files, or pass the preset to the task as `tokenizer=`."
            )
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.source = None if source is None else pathlib.Path(source)
        self._extra_stops = tuple(int(i) for i in stop_token_ids)
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")
        pad = self._id("pad_token")
        if pad is None:
            pad = 0 if self.eos_token_id is None else self.eos_token_id
        self.pad_token_id = pad
        # Ids may have gaps, so the largest id decides.
        self.vocabulary_size = 1 + max(backend.get_vocab().values())
        # Tokens that are parsed in a template's text, never in a message's.
        named = set(self.special_tokens.values())
        self.control_tokens = {
            token.content: i
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special or token.content in named
        }
        self.control_pattern = control_pattern(self.control_tokens)
        self._quoting = control_tokens.QuotingEncoder(
            backend, self.control_tokens, self.control_pattern
        )
        # What is known of the chat template; see `template.py`, `spans.py`.
        self.generation_prompts, self.turn_kinds = {}, {}
        self.end_of_turn = end_of_turn(self)
        stops = set(self._extra_stops)
        stops.add(self.eos_token_id)
        stops.add(self.control_tokens.get(self.end_of_turn))
        self.stop_token_ids = tuple(sorted(stops - {None}))

    def _id(self, name):
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @classmethod
    def from_directory(cls, path):
        """Reads the tokenizer of a Hugging Face directory.

        `tokenizer.json` is used unchanged; a SentencePiece `tokenizer.model`
        is converted where there is no `tokenizer.json`. Special tokens, the
        chat template and the stop tokens come from the directory's own files.

        Args:
            path: string or path, the directory.

        Returns:
            A `Tokenizer`.

        Raises:
            ValueError: neither file exists.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(
                f"`path` must be that of a directory. Received: path={path!r}"
            )
        backend, names, template, stops = tokenizer_files.read(path)
        return cls(
            backend,
            names,
            chat_template=template,
            stop_token_ids=stops,
            source=path,
        )

    @classmethod
    def from_keras_hub(cls, tokenizer):
        """Converts the tokenizer of a KerasHub preset.

        Byte-pair tokenizers get the split pattern their family was published
        with, SentencePiece ones the pipeline of their model file. The chat
        template is the family's published one, where the vocabulary has its
        control tokens.

        Args:
            tokenizer: a `keras_hub` tokenizer with `vocabulary` and `merges`,
                or with a SentencePiece `proto`.

        Returns:
            A `Tokenizer`.

        Raises:
            ValueError: a tokenizer of another kind.
        """
        backend, names, template, stops = conversion.from_keras_hub(tokenizer)
        return cls(
            backend, names, chat_template=template, stop_token_ids=stops
        )

    @property
    def content(self):
        """Strings and numbers that everything it does depends on."""
        return (
            self.backend.to_str(),
            sorted(self.special_tokens.items()),
            self.chat_template,
            self.stop_token_ids,
        )

    def encode(self, text, add_special_tokens=False):
        """Encodes a text.

        Args:
            text: string. Control tokens written in it are parsed.
            add_special_tokens: bool, whether the tokens that the tokenizer's
                own post-processor puts around a text are added.

        Returns:
            List of ints.
        """
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_offsets(self, text, add_special_tokens=False):
        """Encodes a text, with the offsets of its tokens.

        Args:
            text: string.
            add_special_tokens: bool, as in `encode`.

        Returns:
            Tuple `(ids, offsets)`: a list of ints and a list of
            `(start, end)` in characters of `text`. The tokens of one
            character that was split into bytes all have that character's
            offsets; tokens that were added have `(0, 0)`.
        """
        if not isinstance(text, str):
            raise ValueError(f"`text` must be a str. Received: text={text!r}")
        encoding = self.backend.encode(
            text, add_special_tokens=add_special_tokens
        )
        return encoding.ids, encoding.offsets

    def encode_mixed(self, text, plain):
        """Encodes a text in which some control tokens are plain text.

        Args:
            text: string.
            plain: list of `(start, end)`, the places of control tokens in
                `text` that are to be read as text.

        Returns:
            Tuple `(ids, offsets)` as of `encode_with_offsets`.
        """
        if not plain:
            return self.encode_with_offsets(text)
        return self._quoting.encode(text, plain)

    def find_control_tokens(self, text):
        """Finds control tokens in a text, as `(start, end)`, in order."""
        return [m.span() for m in self.control_pattern.finditer(text)]

    def decode(self, ids, skip_special_tokens=True):
        """Decodes token ids.

        Args:
            ids: sequence of ints.
            skip_special_tokens: bool, whether control tokens are left out.

        Returns:
            String.
        """
        if isinstance(ids, str):
            raise ValueError(
                f"`ids` must be a sequence of ints. Received: ids={ids!r}"
            )
        ids = [int(i) for i in ids]
        wrong = [i for i in ids if not 0 <= i < 2**32]
        if wrong:
            raise ValueError(
                "`ids` must be ids of the vocabulary, from 0 to "
                f"{self.vocabulary_size - 1}. Received: {wrong[0]}"
            )
        return self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens
        )

    def with_chat_template(self, chat_template):
        """Makes a copy of this tokenizer with another chat template.

        Args:
            chat_template: string, a Jinja2 template.

        Returns:
            A `Tokenizer`; its stop tokens follow the new template.

        Raises:
            ValueError: the template is no valid Jinja2.
        """
        if chat_template is not None:
            check_template(chat_template)
        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.backend.to_str()),
            self.special_tokens,
            chat_template=chat_template,
            stop_token_ids=self._extra_stops,
            source=self.source,
        )

    def save(self, path):
        """Writes the tokenizer as a Hugging Face directory.

        The files of the directory it was read from are copied unchanged, so
        that `transformers` and KerasHub read the same tokenizer from both.

        Args:
            path: string or path; made where it is missing.
        """
        tokenizer_files.write(self, path)
