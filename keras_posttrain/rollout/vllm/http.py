"""HTTP requests to a vLLM server."""

import http.client
import json
import urllib.parse

from keras_posttrain.rollout.vllm.jobs import EngineFailure


def call(url, api_key, method, path, body, timeout, connections):
    """Sends a request with a JSON `body` and returns the JSON of the answer.

    An empty answer is `{}`. `timeout` is in seconds; `connections` is a set
    that contains the connection while it is open.

    Raises:
        EngineFailure: if there is no answer, or the server is in another
            state than expected.
        ValueError: if the server rejects the request.
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
    connections.add(connection)
    try:
        connection.request(method, parts.path + path, data, headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailure(
            f"{method} {path}: {type(error).__name__}: {error}"
        ) from error
    finally:
        connections.discard(connection)
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
