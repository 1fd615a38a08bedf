"""Prints pip's settings as those of uv, which a shell evaluates.

Where packages come from, and which versions: uv has settings of its own and
reads none of pip's.
"""

import ast
import shlex
import subprocess
import sys

# How pip's settings are called by uv, and what stands between two values.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}

listed = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"],
    check=True,
    capture_output=True,
    text=True,
).stdout
settings = {}
for line in listed.splitlines():
    key, _, value = line.partition("=")
    # The environment is listed first, and wins over files.
    settings.setdefault(key.rpartition(".")[2], ast.literal_eval(value))
# The newest version of all indexes, and no file that stays on the disk.
# Modules are compiled, once for all processes that tests start, as by pip.
lines = {
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_NO_CACHE": "1",
    "UV_COMPILE_BYTECODE": "1",
}
for key, (name, separator) in NAMES.items():
    if values := settings.get(key, "").split():
        lines[name] = separator.join(values)
for name, value in lines.items():
    print(f"export {name}={shlex.quote(value)}")
