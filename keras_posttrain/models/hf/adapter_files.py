"""Reads PEFT's adapter directories and rejects methods other than LoRA."""

import json
import pathlib
import re

from keras_posttrain.models.hf.checkpoint_files import Reader

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# The text model inside a multimodal one, and what a text model has there.
TEXT_MODEL = "model.language_model."
# PEFT settings that change the function an adapter computes, with the value
# that plain LoRA has. Other values are other methods.
PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "lora_bias": False,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
# Settings that adapt fewer layers than `target_modules` names.
NARROWED = ("layers_to_transform", "layers_pattern", "exclude_modules")
# Initializations of A and B that leave the base weights unchanged. The others
# (PiSSA, OLoRA, CorDA, LoftQ, ...) subtract a part of the base weights.
PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def module_name(tensor_name):
    """Returns the module of a tensor: its name without `lora_A.weight`."""
    return re.sub(r"\.lora_\w+(\.weight)?$", "", tensor_name)


def module_names(tensors):
    """Returns the last parts of the adapted modules' names, for messages."""
    return sorted({module_name(n).rsplit(".", 1)[-1] for n in tensors})


def read_config(directory):
    """Reads the config of a PEFT adapter; checks that weights exist too."""
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
    """Returns a `Reader` of a PEFT adapter's tensors."""
    return Reader(directory, single=WEIGHTS_FILE)


def read_peft(directory):
    """Reads the config and the tensors of a PEFT adapter directory."""
    config, tensors = read_config(directory), open_weights(directory)
    return config, {name: tensors.get(name) for name in tensors.shapes}


def _of_experts(parameter):
    """Returns the pattern of one of PEFT's `target_parameters`.

    Those of mixtures are the experts' kernels; a name may leave out the module
    that has them.
    """
    if "experts." not in parameter:
        parameter = f"experts.{parameter}"
    return rf"(?:^|\.){re.escape(parameter)}"


def lora_settings(config, directory):
    """Converts a PEFT `adapter_config.json` to arguments of `kpt.LoRA`.

    An adapter that is not plain LoRA raises a `ValueError`.
    """
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(
            f"Only LoRA adapters can be loaded. {str(directory)!r} holds "
            f"peft_type={config['peft_type']!r}."
        )
    # Methods that extend LoRA have a config inside LoRA's. That of EVA only
    # concerns the initial values of A.
    others = [k for k in config if k.endswith("_config") and k != "eva_config"]
    for key, plain in (*PLAIN.items(), *((k, None) for k in others)):
        value = config.get(key, plain)
        if value != plain and value not in (None, False, {}, []):
            raise ValueError(
                f"The adapter in {str(directory)!r} uses {key}={value!r}, "
                f"which is not plain LoRA; only {key}={plain!r} is supported."
            )
    initialization = config.get("init_lora_weights")
    if initialization not in PLAIN_INITIALIZATIONS:
        raise ValueError(
            f"The adapter in {str(directory)!r} was initialized with "
            f"init_lora_weights={initialization!r}, which changes the base "
            "weights too. Convert it to plain LoRA with PEFT: "
            "`save_pretrained(..., path_initial_model_for_weight_conversion="
            "...)`."
        )
    parameters = config.get("target_parameters") or []
    default = [] if parameters else "all-linear"
    targets = config.get("target_modules") or default
    if not isinstance(targets, (str, list)):
        raise ValueError(
            f"`target_modules` of the adapter in {str(directory)!r} must be "
            f"a list of names. Received: target_modules={targets!r}"
        )
    if any(config.get(key) for key in NARROWED):
        # The names of the tensors show which layers these settings left.
        names = {module_name(n) for n in open_weights(directory).names}
        targets = [name.removeprefix(PREFIX) for name in names]
    if not isinstance(targets, str):
        targets = [t.replace(TEXT_MODEL, "model.", 1) for t in targets]
        targets = tuple(rf"(?:^|\.){re.escape(t)}" for t in sorted(targets))
        targets += tuple(map(_of_experts, sorted(parameters)))
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": config.get("lora_dropout", 0.0),
        "targets": targets,
        "rslora": config.get("use_rslora", False),
    }
