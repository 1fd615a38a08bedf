"""PEFT's adapter directories, and which of them hold plain LoRA."""

import json
import pathlib
import re

from keras_posttrain.models.hf.checkpoint_files import Reader

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT settings that change the function an adapter computes; every other
# value than the one given here is another method.
PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "lora_bias": False,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
# Settings that adapt fewer layers than `target_modules` names.
NARROWED = ("layers_to_transform", "layers_pattern", "exclude_modules")
# Ways to start A and B that leave the base as it is. The others (PiSSA, OLoRA,
# CorDA, LoftQ, ...) train beside a base of which a part was taken away.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def module_name(tensor_name):
    """The name a tensor belongs to, less its `lora_A.weight`."""
    return re.sub(r"\.lora_\w+(\.weight)?$", "", tensor_name)


def module_names(tensors):
    """Last parts of the names of the modules adapted, for a message."""
    return sorted({module_name(n).rsplit(".", 1)[-1] for n in tensors})


def read_config(directory):
    """The config of a PEFT adapter directory, which has its weights too."""
    directory = pathlib.Path(directory)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / file).exists():
            raise ValueError(
                f"A PEFT adapter directory has {CONFIG_FILE} and "
                f"{WEIGHTS_FILE}; {file} is missing. "
                f"Received: {str(directory)!r}"
            )
    return json.loads((directory / CONFIG_FILE).read_text())


def open_weights(directory):
    """A `Reader` of a PEFT adapter directory's tensors."""
    return Reader(directory, single=WEIGHTS_FILE)


def read_peft(directory):
    """The config and the tensors of a PEFT adapter directory."""
    config, tensors = read_config(directory), open_weights(directory)
    return config, {name: tensors.get(name) for name in tensors.shapes}


def lora_settings(config, directory):
    """The arguments of `kpt.LoRA` in a PEFT `adapter_config.json`.

    Args:
        config: dict, the file's content.
        directory: str or path of the adapter.

    Returns:
        A dict.

    Raises:
        ValueError: where the adapter computes something else than LoRA does.
    """
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(
            f"Only LoRA adapters can be loaded. {str(directory)!r} holds "
            f"peft_type={config['peft_type']!r}."
        )
    # Methods beside LoRA have a config inside its config; EVA's only says how
    # A was started.
    others = [k for k in config if k.endswith("_config") and k != "eva_config"]
    for key, plain in (*PLAIN.items(), *((k, None) for k in others)):
        value = config.get(key, plain)
        if value != plain and value not in (None, False, {}):
            raise ValueError(
                f"The adapter in {str(directory)!r} uses {key}={value!r}, "
                f"which is not plain LoRA; only {key}={plain!r} is supported."
            )
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"The adapter in {str(directory)!r} was started with "
            f"init_lora_weights={start!r}, which changes the base weights "
            "too. Convert it to plain LoRA with PEFT: "
            "`save_pretrained(..., path_initial_model_for_weight_conversion="
            "...)`."
        )
    targets = config.get("target_modules") or "all-linear"
    if any(config.get(key) for key in NARROWED):
        # The names of the tensors say what these settings left over.
        names = {module_name(n) for n in open_weights(directory).names}
        targets = [name.removeprefix(PREFIX) for name in names]
    if not isinstance(targets, str):
        targets = tuple(rf"(?:^|\.){re.escape(t)}" for t in sorted(targets))
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": config.get("lora_dropout", 0.0),
        "targets": targets,
        "rslora": config.get("use_rslora", False),
    }
