"""What a run is: the task, its settings, versions and the command."""

import importlib.metadata
import os
import platform
import re
import shlex
import sys

import jax

PACKAGES = ("keras", "keras-hub", "jax", "jaxlib", "numpy", "optax")
SECRET = re.compile(
    r"(.*[-_])?(\w*key|token|secret|password|passwd|credentials?)",
    re.IGNORECASE,
)


def of_run(task, params):
    """Returns what a run of a task is, a dict of dicts of plain values.

    Args:
        task: the task, during `fit`.
        params: dict, those of Keras's callbacks.
    """
    run = task.run
    backbone = task.causal_lm.backbone
    trained = sum(_size(v) for v in task.trainable_variables)
    every = sum(_size(v) for v in task.variables)
    adapter = getattr(task, "adapter", None)
    return {
        "run": {
            "task": type(task).__name__,
            "preset": getattr(task, "preset", None),
            "model": type(task.causal_lm).__name__,
            "layers": getattr(backbone, "num_layers", None),
            "hidden size": getattr(backbone, "hidden_dim", None),
            "vocabulary": getattr(backbone, "vocabulary_size", None),
            "parameters": f"{every:,} ({trained:,} trained)",
            "adapter": repr(adapter.lora) if adapter else None,
            "loss": repr(task.objective),
            "optimizer": type(task.optimizer).__name__,
            "seed": run.state.seed,
            "epochs": params.get("epochs"),
            "sequence length": task.sequence_length,
            **_of_sampling(task),
        },
        "versions": {
            "keras_posttrain": _version("keras_posttrain"),
            **{name: _version(name) for name in PACKAGES},
            "Python": platform.python_version(),
            "system": platform.platform(),
            "devices": _devices(),
        },
        "command": {"directory": os.getcwd(), "to resume": command(sys.argv)},
    }


def _of_sampling(task):
    sampling = getattr(task, "sampling", None)
    scoring = getattr(task, "scoring", None)
    found = {}
    if sampling is not None:
        found |= {
            "engine": type(task.rollout).__name__,
            "completions a prompt": sampling.num_generations,
            "longest completion": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "old log-probabilities": sampling.old_log_probs,
        }
    if scoring is not None:
        found |= {
            "rewards": ", ".join(map(str, scoring.names)),
            "advantages": repr(scoring.advantages),
        }
    return found


def _devices():
    devices = jax.devices()
    kinds = sorted({x.device_kind for x in devices})
    many = f"{len(devices)} x {', '.join(kinds)}"
    count = jax.process_count()
    return many if count == 1 else f"{many}, {count} processes"


def _size(variable):
    size = 1
    for n in variable.shape:
        size *= n
    return size


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def command(argv):
    """Returns the command of this process, without secrets.

    The values of options whose names say that they are keys, tokens or
    passwords are left out.
    """
    shown, hide = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            word = "***"
        elif equals and SECRET.fullmatch(name):
            word = f"{name}=***"
        is_option = word.startswith("-") and not equals
        hide = is_option and bool(SECRET.fullmatch(word))
        shown.append(word)
    if not shown or not shown[0].endswith(".py"):
        return "run the same script or notebook again"
    return shlex.join(["python", *shown])
