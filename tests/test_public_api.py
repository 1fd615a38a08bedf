"""The public names and signatures, compared with a golden file.

A change of the public interface is a change of `golden/public_api.txt`, which
a reviewer sees. Write it again with
`KERAS_BACKEND=jax python tests/test_public_api.py`.
"""

import dataclasses
import functools
import inspect
import pathlib
import re
import types

import keras

import keras_posttrain
import keras_posttrain.serve

GOLDEN = pathlib.Path(__file__).parent / "golden" / "public_api.txt"
# What Keras calls or what comes from dataclasses is not ours to document.
HIDDEN = {"__call__"}


def signature(function):
    """The arguments as written; `=…` for defaults that print an address."""
    text = str(inspect.signature(function))
    return re.sub(r"<[^<>]*>", "…", text)


def is_ours(cls):
    return cls.__module__.startswith("keras_posttrain")


def bases(cls):
    """The nearest classes above that a user knows."""
    for base in cls.__bases__:
        if is_ours(base) and base not in public_classes():
            yield from bases(base)
        elif base is not object:
            yield base


def public_classes():
    modules = [keras_posttrain, keras_posttrain.callbacks]
    modules += [keras_posttrain.losses, keras_posttrain.rewards]
    modules += [keras_posttrain.rollout, keras_posttrain.distribution]
    modules += [keras_posttrain.episodes, keras_posttrain.serve]
    values = [getattr(m, name) for m in modules for name in m.__all__]
    return [value for value in values if isinstance(value, type)]


def members(cls):
    """Public names of a class that no public class above it has."""
    above = [c for c in public_classes() if c is not cls]
    for name in sorted(dir(cls)):
        owner = next(c for c in cls.__mro__ if name in vars(c))
        if name.startswith("_") and name not in HIDDEN:
            continue
        if not is_ours(owner) or any(
            issubclass(cls, c) and issubclass(c, owner) for c in above
        ):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, (classmethod, staticmethod)):
            kind = type(value).__name__
            yield f"{name}{signature(getattr(cls, name))}  # {kind}"
        elif isinstance(value, types.FunctionType):
            yield f"{name}{signature(value)}"
        elif isinstance(value, (property, functools.cached_property)):
            yield f"{name}  # property"
        elif not dataclasses.is_dataclass(cls) or name not in [
            field.name for field in dataclasses.fields(cls)
        ]:
            yield f"{name} = {value!r}"


def describe(module, prefix):
    """A line for each public name of a module and of what is in it."""
    for name in sorted(module.__all__):
        value, full = getattr(module, name), f"{prefix}.{name}"
        if isinstance(value, types.ModuleType):
            yield from describe(value, full)
        elif isinstance(value, type):
            above = ", ".join(base.__name__ for base in bases(value))
            above = f" of {above}" if above else ""
            yield f"class {full}{signature(value)}{above}"
            for member in members(value):
                yield f"    .{member}"
        else:
            yield f"{full}{signature(value)}"


def public_api():
    lines = list(describe(keras_posttrain, "keras_posttrain"))
    # Not part of the package's import, as it needs an extra.
    lines += describe(keras_posttrain.serve, "keras_posttrain.serve")
    return "\n".join(lines) + "\n"


def test_the_public_interface_is_the_golden_one():
    assert public_api() == GOLDEN.read_text(encoding="utf-8"), (
        "The public interface has changed. If it was meant to, write the "
        "golden file again: KERAS_BACKEND=jax python tests/test_public_api.py"
    )


def test_every_public_name_is_documented():
    undocumented = []
    for value in [*public_classes(), keras_posttrain.decay_mask]:
        text = value.__doc__ or ""
        # A dataclass without a text is given its signature for one.
        if not text.strip() or text.startswith(f"{value.__name__}("):
            undocumented.append(value.__name__)
    assert undocumented == []


def test_keras_classes_stay_keras_classes():
    assert issubclass(keras_posttrain.Task, keras.Model)
    for name in keras_posttrain.callbacks.__all__:
        cls = getattr(keras_posttrain.callbacks, name)
        assert issubclass(cls, keras.callbacks.Callback)


if __name__ == "__main__":
    GOLDEN.write_text(public_api(), encoding="utf-8")
