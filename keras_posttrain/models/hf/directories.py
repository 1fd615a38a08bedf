"""Finds the directory of a Hugging Face checkpoint."""

import difflib
import os
import pathlib

import keras_hub

from keras_posttrain import _remote
from keras_posttrain.models.hf.checkpoint_files import CONFIG, read_json

# Handles that are no addresses of files.
HANDLES = ("hf://", "kaggle://")

# The files to download. Some repositories have the weights a second time in
# other safetensors files.
PATTERNS = [
    "*.json",
    "*.jinja",
    "model*.safetensors",
    "*.txt",
    "tokenizer.model",
]


def on_this_machine(preset):
    """Returns a preset, copied to this machine if it is an address."""
    if not _remote.is_address(preset) or os.fspath(preset).startswith(HANDLES):
        return preset
    with _remote.read(preset) as path:
        return path


def resolve(preset):
    """Returns the directory of a Hugging Face preset, downloaded if needed.

    `preset` is a directory or its address, `hf://owner/name` (downloaded),
    `kaggle://...` or the name of a KerasHub preset; if there is none, it
    raises a `ValueError`. The result is `None` for a preset of KerasHub, which
    has no Hugging Face `config.json` (with a `model_type`).
    """
    if not isinstance(preset, (str, os.PathLike)) or not os.fspath(preset):
        raise ValueError(
            "`preset` must be a name or a path, such as 'qwen3_0.6b_en'. A "
            "model that you hold is the first argument of the task's class: "
            f"`kpt.SFTTask(causal_lm)`. Received: preset={preset!r}"
        )
    preset = os.fspath(on_this_machine(preset))
    if preset.startswith("hf://"):
        return _download(preset)
    # KerasHub looks through all of its classes for the names, which takes as
    # long as building a tiny model; no name is a path.
    is_name = os.path.basename(preset) == preset
    if "://" in preset or (
        is_name and preset in keras_hub.models.CausalLM.presets
    ):
        return None
    path = pathlib.Path(preset).expanduser()
    if not path.is_dir():
        names = keras_hub.models.CausalLM.presets
        close = difflib.get_close_matches(preset, names, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?"
        raise ValueError(
            "A preset must be the path of an existing directory (Hugging "
            "Face's or KerasHub's), 'hf://owner/name', 'kaggle://...' or a "
            "name in `keras_hub.models.CausalLM.presets`. "
            f"Received: preset={preset!r}.{hint if close else ''}"
        )
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"The directory of a model must hold `{CONFIG}`. Received: "
            f"preset={preset!r}, with {sorted(p.name for p in path.iterdir())}"
        )
    return path if "model_type" in read_json(path / CONFIG) else None


def _download(preset):
    # Slow to import, and only needed for downloads.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository = preset.removeprefix("hf://").strip("/")
    if repository.count("/") != 1:
        raise ValueError(
            "A preset on the Hugging Face Hub must be 'hf://owner/name'. "
            f"Received: preset={preset!r}"
        )
    # Without the network the Hub's own client would try each file six times.
    offline = _no_connection()
    local = {"local_files_only": offline is not None}
    # The config comes first: it shows whether KerasHub should download the
    # rest.
    try:
        config = pathlib.Path(hf_hub_download(repository, CONFIG, **local))
        if "model_type" not in read_json(config):
            return None
        return pathlib.Path(
            snapshot_download(repository, allow_patterns=PATTERNS, **local)
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{preset!r} is not in the cache of the Hugging Face Hub, which "
            f"cannot be reached. Received: {offline or error}. Connect to the "
            "network, set HF_ENDPOINT to a mirror, or pass the path of a "
            "directory."
        ) from error


def _no_connection():
    """Returns why the Hugging Face Hub cannot be reached, or `None`."""
    # Slow to import, and only needed for downloads.
    from huggingface_hub import constants, get_session

    try:
        get_session().head(
            constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except Exception as error:  # noqa: BLE001 - of the client that is in use
        return f"{constants.ENDPOINT}: {error}"
    return None
