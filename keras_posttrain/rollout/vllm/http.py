"""Requests to a server of vLLM's."""

import http.client
import json
import urllib.parse

from keras_posttrain.rollout.vllm.jobs import EngineFailure


def call(url, api_key, method, path, body, timeout, open_ones):
    """One request; its answer's JSON, `{}` where it has none.

    Args:
        url: str, the server's address.
        api_key: str or `None`.
        method, path: str.
        body: what JSON can say, or `None`.
        timeout: float, seconds.
        open_ones: set that the connection is in while it is open.

    Raises:
        EngineFailure: if there is no answer, or one that tells of a
            server that is not, or no longer, as it was left.
        ValueError: if the server refuses what was asked.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
    connection = kind(parts.netloc, timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body)
    open_ones.add(connection)
    try:
        connection.request(method, parts.path + path, data, headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailure(
            f"{method} {path}: {type(error).__name__}: {error}"
        ) from error
    finally:
        open_ones.discard(connection)
        connection.close()
    if status in (400, 401, 403, 422):
        raise ValueError(
            f"vLLM's server refused {method} {path} with {status}: "
            f"{text.decode(errors='replace')[:1000]}"
        )
    if status != 200:
        raise EngineFailure(
            f"{method} {path}: status {status}, "
            f"{text.decode(errors='replace')[:1000]}"
        )
    try:
        return json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
