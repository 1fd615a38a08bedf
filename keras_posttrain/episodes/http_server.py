"""A chat server on this machine's loopback address."""

import concurrent.futures
import http
import json
import secrets
import threading
import weakref

from keras_posttrain.episodes import chat_api
from keras_posttrain.episodes.loopback import LoopbackHandler, LoopbackServer

PATHS = ("/v1/chat/completions", "/chat/completions")


class ChatServer:
    """An HTTP server of OpenAI's chat completions, with a key a session.

    It listens on 127.0.0.1 alone, on a free port, until the object is
    deleted.

    Attributes:
        url: string, the `base_url` of clients.
    """

    def __init__(self):
        self._answers = {}
        self._server = LoopbackServer(_handler(self._answers))
        self.url = f"http://127.0.0.1:{self._server.port}/v1"
        # It must not keep the object.
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), daemon=True
        ).start()
        weakref.finalize(self, _stop, self._server)

    def open(self, answer):
        """Opens a session and returns its key.

        Args:
            answer: function of the body of a request, a dict, to a future of
                a `chat_api.Answer`; called from any thread.
        """
        key = f"kpt-{secrets.token_urlsafe(24)}"
        self._answers[key] = answer
        return key

    def close(self, key):
        """Ends a session: its key is refused from now on."""
        self._answers.pop(key, None)


def _stop(server):
    server.shutdown()
    server.server_close()


def _handler(answers):
    """Returns the class that handles requests.

    `answers` has the function of each open session by its key.
    """

    class Handler(LoopbackHandler):
        def do_GET(self):
            if self._session() is None:
                return
            if self.path.partition("?")[0] in ("/v1/models", "/models"):
                model = {"id": "policy", "object": "model", "created": 0}
                model["owned_by"] = "keras_posttrain"
                self._send(200, {"object": "list", "data": [model]})
            else:
                self._refuse(_unknown(self.path))

        def do_POST(self):
            try:
                body = self.read_body(chat_api.Refused)
                if (answer := self._session()) is None:
                    return
                if self.path.partition("?")[0] not in PATHS:
                    raise _unknown(self.path)
                found = _result(answer, _parsed(body))
            except chat_api.Refused as refused:
                self._refuse(refused)
                return
            if found.stream:
                self._stream(found.chunks())
            else:
                self._send(200, found.completion())

        def _session(self):
            """Returns the function of the session, or refuses."""
            given = self.headers.get("Authorization", "")
            answer = answers.get(given.removeprefix("Bearer "))
            if answer is not None:
                return answer
            self._refuse(
                chat_api.Refused(
                    "The key is not that of an open episode. Use the "
                    "`api_key` that the agent was given.",
                    401,
                )
            )
            return None

        def _refuse(self, refused):
            self._send(refused.status, refused.body())

        def _send(self, status, body):
            data = json.dumps(body).encode()
            self.send_bytes(status, data, "application/json")

        def _stream(self, chunks):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

    return Handler


def _parsed(body):
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise chat_api.Refused(f"The request is no JSON: {error}") from error


def _result(answer, body):
    over = chat_api.Refused("The episode is over.", 410)
    try:
        future = answer(body)
    except RuntimeError as error:
        # The loop of the episode is closed.
        raise over from error
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise over from error


def _unknown(path):
    return chat_api.Refused(
        f"This server has POST {PATHS[0]}, OpenAI's chat completions, alone. "
        f"Received: {path}. Set the agent's client to chat completions.",
        http.HTTPStatus.NOT_FOUND,
    )
