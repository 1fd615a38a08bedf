"""The page: one HTML file with its data, without network and server.

Samples are hostile. They are data in a script tag that no tag can end, the
page's script writes them as text alone, and its policy allows no other script
and no request.
"""

import base64
import functools
import hashlib
import json
import os
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
FORMAT = 1
DATA = re.compile(
    r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src '{script_hash}'; style-src '{style_hash}'; base-uri 'none'; \
form-action 'none'">
<title>Report</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript, which is in the file.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


@functools.cache
def _assets():
    """Returns script and style, and their hashes for the policy."""
    found = {}
    for name, file in (("script", "page.js"), ("style", "page.css")):
        text = "\n" + (FOLDER / file).read_text(encoding="utf-8")
        digest = hashlib.sha256(text.encode()).digest()
        found[name] = text
        found[f"{name}_hash"] = (
            f"sha256-{base64.b64encode(digest).decode('ascii')}"
        )
    return found


def render(runs):
    """Returns the page of runs, a list of JSON texts, as a string."""
    data = f'{{"format":{FORMAT},"runs":[{",".join(runs)}]}}'
    if "<" in data:
        raise ValueError("The data of a page must be encoded by `encode`.")
    return PAGE.format(data=data, **_assets())


def write(path, text):
    """Writes a page to a path, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read(path):
    """Returns the runs of a page that `write` wrote, a list of dicts.

    Raises:
        ValueError: the file is no such page.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8")
    found = DATA.search(text)
    try:
        data = json.loads(found[1])
        if data["format"] != FORMAT:
            raise ValueError
        return data["runs"]
    except (TypeError, ValueError, KeyError) as e:
        raise ValueError(
            "The file must be a page that `kpt.callbacks.Report` wrote with "
            f"this version. Received: {str(path)!r}"
        ) from e
