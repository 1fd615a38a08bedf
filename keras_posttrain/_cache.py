"""The directory of what runs keep for each other."""

import os
import pathlib

VARIABLE = "KERAS_POSTTRAIN_CACHE"


def directory():
    """Returns the `pathlib.Path` of the user's cache, or `None` if it is off.

    The environment variable `KERAS_POSTTRAIN_CACHE` sets another directory,
    or turns the cache off with `0` or `off`.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting.lower() in ("0", "off", "false", "no"):
        return None
    if "://" in setting:
        raise ValueError(
            f"`{VARIABLE}` must name a folder of this machine, where "
            f"rows are read as they are needed. Received: {VARIABLE}={setting}"
        )
    if setting:
        return pathlib.Path(setting).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(root, "keras_posttrain").expanduser()
