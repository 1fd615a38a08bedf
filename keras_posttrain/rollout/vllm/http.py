"""HTTP requests to a vLLM server."""

import contextlib
import http.client
import json
import socket
import urllib.parse

from keras_posttrain.rollout.vllm.jobs import EngineFailure


class Connections:
    """The connections that are open, to end them from another thread.

    Attributes:
        closed: bool, whether `close` was called.
    """

    def __init__(self):
        self.closed = False
        self._open = set()

    def add(self, connection):
        self._open.add(connection)

    def discard(self, connection):
        self._open.discard(connection)

    def close(self):
        """Ends each thread that is waiting for an answer, by an error."""
        self.closed = True
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def call(url, api_key, method, path, body, timeout, connections, headers=None):
    """Sends a request with a JSON `body` and returns the JSON of the answer.

    `url` may be `unix:` and the path of a socket. An empty answer is `{}`.
    `timeout` is in seconds; `connections` are `Connections`; `headers` is a
    dict of further ones.

    Raises:
        EngineFailure: if there is no answer, or the server is in another
            state than expected.
        ValueError: if the server rejects the request.
    """
    parts = urllib.parse.urlsplit(url)
    place, prefix = parts.netloc, parts.path
    kind = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
    elif parts.scheme == "unix":
        kind, place, prefix = _UnixConnection, parts.path, ""
    connection = kind(place, timeout=timeout)
    headers = {"Content-Type": "application/json", **(headers or {})}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body)
    connections.add(connection)
    try:
        connection.request(method, prefix + path, data, headers)
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


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a socket in the file system."""

    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
