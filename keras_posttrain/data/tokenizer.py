"""One tokenizer for all presets: ids, offsets, stop tokens, chat template."""

import bisect
import copy
import json
import pathlib
import shutil

import tokenizers

from keras_posttrain.data import chat
from keras_posttrain.data import conversion

# What a Hugging Face directory may hold about its tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A text tokenizer with its special tokens and chat template.

    It wraps a `tokenizers.Tokenizer`, so every token comes with its place in
    the text, and gives the ids that `transformers` gives for the same
    directory. Make one with `from_directory` or `from_keras_hub`.

    Args:
        backend: a `tokenizers.Tokenizer`.
        special_tokens: dict of names such as `"bos_token"`, `"eos_token"` and
            `"pad_token"` to strings. Chat templates see them under these
            names.
        chat_template: string, a Jinja2 template, or `None`.
        stop_token_ids: iterable of ints, ids that end a completion beside the
            end token and the chat template's end of turn.
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
    tokenizer = Tokenizer.from_directory("path/to/huggingface/model")
    ids, offsets = tokenizer.encode_with_offsets("Hello world")
    tokenizer.decode(ids)
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
        self.vocabulary_size = backend.get_vocab_size(with_added_tokens=True)
        # Tokens that are parsed in a template's text, never in a message's.
        named = set(self.special_tokens.values())
        self.control_tokens = {
            token.content: i
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special or token.content in named
        }
        self._plain_backend = None
        self._aliases = {}
        self.generation_prompts = {}
        self.end_of_turn = chat.end_of_turn(self)
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

        `tokenizer.json` is used as it is; a directory with a SentencePiece
        `tokenizer.model` alone is converted. Special tokens, the chat
        template and the stop tokens come from the directory's own files.

        Args:
            path: string or path, the directory.

        Returns:
            A `Tokenizer`.

        Raises:
            ValueError: there is neither file.
        """
        path = pathlib.Path(path)
        config = _read_json(path / "tokenizer_config.json")
        names = _special_tokens(path, config)
        if (path / "tokenizer.json").is_file():
            backend = tokenizers.Tokenizer.from_file(
                str(path / "tokenizer.json")
            )
        elif (path / "tokenizer.model").is_file():
            backend = conversion.from_sentencepiece_file(path, config, names)
        else:
            raise ValueError(
                "A tokenizer's directory must hold `tokenizer.json` or "
                f"`tokenizer.model`. Received: path={str(path)!r} with "
                f"{sorted(p.name for p in path.glob('*'))}. Copy the model's "
                "tokenizer files there."
            )
        generation = _read_json(path / "generation_config.json")
        model = _read_json(path / "config.json")
        for name in ("bos_token", "eos_token", "pad_token"):
            # An explicit null in the tokenizer's files means "none".
            if name not in names:
                ids = _as_list(model.get(f"{name}_id"))
                ids = ids or _as_list(generation.get(f"{name}_id"))
                token = backend.id_to_token(ids[0]) if ids else None
                if token is not None:
                    names[name] = token
        return cls(
            backend,
            {k: v for k, v in names.items() if v is not None},
            chat_template=_chat_template(path, config),
            stop_token_ids=_as_list(generation.get("eos_token_id")),
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
        backend, names, template = conversion.from_keras_hub(tokenizer)
        stops = [
            getattr(tokenizer, name, None)
            for name in ("end_token_id", "end_token2_id")
        ]
        return cls(
            backend,
            names,
            chat_template=template,
            stop_token_ids=[i for i in stops if i is not None],
        )

    def encode(self, text, add_special_tokens=False):
        """Token ids of a text.

        Args:
            text: string. Control tokens written in it are parsed.
            add_special_tokens: bool, whether the tokens that the tokenizer's
                own post-processor puts around a text are added.

        Returns:
            List of ints.
        """
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_offsets(self, text, add_special_tokens=False):
        """Token ids of a text and where each token stands in it.

        Args:
            text: string.
            add_special_tokens: bool, as in `encode`.

        Returns:
            Tuple `(ids, offsets)`: a list of ints and a list of
            `(start, end)` in characters of `text`. The tokens of one
            character that was split into bytes all have that character's
            place; tokens that were added have `(0, 0)`.
        """
        encoding = self.backend.encode(
            text, add_special_tokens=add_special_tokens
        )
        return encoding.ids, encoding.offsets

    def encode_mixed(self, text, plain):
        """Encodes a text in which some control tokens are plain text.

        The control tokens that count are swapped for private stand-ins which
        a copy of the tokenizer knows as added tokens, while that copy reads
        all others as text. So the text is still encoded in one go.

        Args:
            text: string.
            plain: list of `(start, end)`, the places of control tokens in
                `text` that are to be read as text.

        Returns:
            Tuple `(ids, offsets)` as of `encode_with_offsets`.
        """
        if not plain:
            return self.encode_with_offsets(text)
        pieces, ends, shift, at = [], [], [], 0
        plain = set(plain)
        length = 0
        for start, end in self.find_control_tokens(text):
            if (start, end) in plain:
                continue
            alias = self._alias(text[start:end])
            if alias in text:
                raise ValueError(
                    "A message that quotes control tokens cannot hold the "
                    f"private-use character U+{ord(alias):X} too. Received: "
                    f"text={text!r}. Remove it from the row."
                )
            pieces += [text[at:start], alias]
            length += start - at + 1
            ends.append(length)
            shift.append(end - length)
            at = end
        pieces.append(text[at:])
        encoding = self._plain_backend_with_aliases().encode(
            "".join(pieces), add_special_tokens=False
        )
        back = {v: k for k, v in self._alias_ids().items()}
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

    def find_control_tokens(self, text):
        """Places of control tokens in a text, as `(start, end)`, in order."""
        pattern = chat.control_pattern(tuple(self.control_tokens))
        return [match.span() for match in pattern.finditer(text)]

    def _alias(self, token):
        if token not in self._aliases:
            self._aliases[token] = chr(0x10F000 + len(self._aliases))
            self._plain_backend = None
        return self._aliases[token]

    def _alias_ids(self):
        return {
            self.control_tokens[token]: self._plain_backend.token_to_id(alias)
            for token, alias in self._aliases.items()
        }

    def _plain_backend_with_aliases(self):
        if self._plain_backend is None:
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
                    for token, alias in self._aliases.items()
                ]
            )
            self._plain_backend = backend
        return self._plain_backend

    def decode(self, ids, skip_special_tokens=True):
        """Text of token ids.

        Args:
            ids: sequence of ints.
            skip_special_tokens: bool, whether control tokens are left out.

        Returns:
            String.
        """
        return self.backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def with_chat_template(self, chat_template):
        """A copy of this tokenizer with another chat template.

        Args:
            chat_template: string, a Jinja2 template.

        Returns:
            A `Tokenizer`; its stop tokens follow the new template.
        """
        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.backend.to_str()),
            copy.copy(self.special_tokens),
            chat_template=chat_template,
            stop_token_ids=self._extra_stops,
            source=self.source,
        )

    def save(self, directory):
        """Writes the tokenizer as a Hugging Face directory.

        The files of the directory it was read from are copied as they are,
        so that `transformers` and KerasHub read there what they read here.

        Args:
            directory: string or path; made where it is missing.
        """
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        copied = set()
        if self.source is not None:
            copied = {
                name
                for name in TOKENIZER_FILES
                if (self.source / name).is_file()
            }
            if directory.resolve() != self.source.resolve():
                for name in copied:
                    shutil.copyfile(self.source / name, directory / name)
            config = _read_json(self.source / "tokenizer_config.json")
        if "tokenizer.json" not in copied:
            self.backend.save(str(directory / "tokenizer.json"))
        config.update(self.special_tokens)
        # The template has one home: a second copy could differ.
        config.pop("chat_template", None)
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
        )
        template_path = directory / "chat_template.jinja"
        if self.chat_template is not None:
            template_path.write_text(self.chat_template, encoding="utf-8")
        else:
            template_path.unlink(missing_ok=True)


def _unshift(ends, shift):
    """Maps places after the swaps back to places in the text."""

    def place(index):
        i = bisect.bisect_right(ends, index)
        return index + (shift[i - 1] if i else 0)

    return place


def _as_list(value):
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _read_json(path):
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def _special_tokens(path, config):
    names = {}
    for table in (_read_json(path / "special_tokens_map.json"), config):
        for name in SPECIAL_NAMES:
            if name in table:
                token = table[name]
                if isinstance(token, dict):
                    token = token["content"]
                names[name] = token
    return names


def _chat_template(path, config):
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None:
        template = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named and len(named) != 1:
            raise ValueError(
                "A list of chat templates must have one named 'default'. "
                f"Received: names={sorted(named)} in {str(path)!r}. Pass "
                "`chat_template=` with the one to use."
            )
        template = named.get("default", next(iter(named.values())))
    return template
