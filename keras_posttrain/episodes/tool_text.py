"""The results of tools as text.

Processes of isolated tools run this file too. It imports only the standard
library, so that they start in a moment.
"""

import json
import pickle


def as_text(result):
    """Converts what a tool returned, other values than text by JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, bytes):
        return result.decode(errors="replace")
    return json.dumps(result, default=_plain, ensure_ascii=False)


def _plain(value):
    # NumPy's and JAX's numbers and arrays have `tolist`.
    return value.tolist() if hasattr(value, "tolist") else str(value)


def load(data):
    """Returns a function that calls a pickled tool, and returns a text."""
    tool = pickle.loads(data)

    def call(**arguments):
        result = tool(**arguments)
        if hasattr(result, "__await__"):
            # Slow to import.
            import asyncio

            result = asyncio.run(_awaited(result))
        return as_text(result)

    return call


async def _awaited(awaitable):
    return await awaitable
