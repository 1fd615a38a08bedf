"""Reads and writes the tokenizer files of a Hugging Face directory."""

import contextlib
import json
import pathlib
import shutil

import tokenizers

from keras_posttrain.data.chat import conversion

# The tokenizer files that a Hugging Face directory may have.
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


def read(path):
    """Reads a directory; see `Tokenizer.from_directory`.

    Returns:
        Tuple of a `tokenizers.Tokenizer`, a dict of special token names to
        strings, the chat template or `None`, and a list of stop token ids.
    """
    path = pathlib.Path(path)
    config = _read_json(path / "tokenizer_config.json")
    names = _special_tokens(path, config)
    if (path / "tokenizer.json").is_file():
        with _naming(path / "tokenizer.json") as file:
            backend = tokenizers.Tokenizer.from_file(str(file))
    elif (path / "tokenizer.model").is_file():
        with _naming(path / "tokenizer.model"):
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
    names = {k: v for k, v in names.items() if v is not None}
    # Special tokens that are plain words of `tokenizer.json` are parsed too.
    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            token
            for token in dict.fromkeys(names.values())
            if token not in known and backend.token_to_id(token) is not None
        ]
    )
    stops = _as_list(generation.get("eos_token_id"))
    stops = stops or _as_list(model.get("eos_token_id"))
    return backend, names, _chat_template(path, config), stops


def write(tokenizer, path):
    """Writes a directory; see `Tokenizer.save`."""
    directory = pathlib.Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config, copied = {}, set()
    if tokenizer.source is not None:
        copied = {
            name
            for name in TOKENIZER_FILES
            if own_file(tokenizer.source, name).is_file()
        }
        if directory.resolve() != tokenizer.source.resolve():
            for name in copied:
                shutil.copyfile(tokenizer.source / name, directory / name)
        config = _read_json(tokenizer.source / "tokenizer_config.json")
    if "tokenizer.json" not in copied:
        tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {"clean_up_tokenization_spaces": False} | config
    # This class reads `tokenizer.json` unchanged; others are rebuilt from its
    # vocabulary alone, and may treat spaces differently.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.update(tokenizer.special_tokens)
    # The template is stored once: a second copy could differ.
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )
    template_path = directory / "chat_template.jinja"
    if tokenizer.chat_template is not None:
        template_path.write_text(tokenizer.chat_template, encoding="utf-8")
    else:
        template_path.unlink(missing_ok=True)


def own_file(directory, name):
    """Returns the path of a directory's file, to copy it.

    A file that is downloaded with a model may be a link to any other file.
    Those of the Hugging Face cache are links to its own `blobs`.

    Args:
        directory: `pathlib.Path`.
        name: string.

    Returns:
        The path of the file, which may be missing.

    Raises:
        ValueError: it is a link to a file outside the directory.
    """
    path, root = directory / name, directory.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    target = path.resolve()
    if not target.is_relative_to(root):
        raise ValueError(
            "A file of a model that is copied must not be a link to a file "
            f"outside its directory. Received: {str(path)!r}, a link to "
            f"{str(target)!r}. Replace the link with the file itself."
        )
    return path


def _as_list(value):
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _read_json(path):
    if not path.is_file():
        return {}
    with _naming(path):
        return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _naming(file):
    """Makes an error about a file name it."""
    try:
        yield file
    except Exception as error:  # noqa: BLE001 - `tokenizers` has no other
        raise ValueError(
            "A file of a tokenizer cannot be read. If its download was cut "
            "short, or left a pointer of Git LFS, download it again. "
            f"Received: {str(file)!r}, {type(error).__name__}: {error}"
        ) from error


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
