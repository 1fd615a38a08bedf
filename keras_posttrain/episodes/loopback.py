"""HTTP on this machine's loopback address."""

import http.server
import socketserver

# The longest request, in bytes.
MAX_REQUEST = 64 * 2**20


class LoopbackServer(socketserver.ThreadingTCPServer):
    """An HTTP server on 127.0.0.1 alone, with a thread for each connection.

    Args:
        handler: subclass of `LoopbackHandler`.
        port: int, 0 for a free one.
    """

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    # Hundreds of clients may begin at once.
    request_queue_size = 1024

    def __init__(self, handler, port=0):
        super().__init__(("127.0.0.1", port), handler)

    @property
    def port(self):
        return self.server_address[1]

    def handle_error(self, request, client_address):
        """Says nothing: a client that has gone needs no answer."""


class LoopbackHandler(http.server.BaseHTTPRequestHandler):
    """Reads the bodies of requests and writes those of answers."""

    protocol_version = "HTTP/1.1"

    def read_body(self, refused):
        """Returns the body, bytes.

        `refused` is a function of a message and a status to the exception
        that is raised for a body without a length, or that is too long.
        """
        length = self.headers.get("Content-Length")
        if length is None or not length.isdecimal():
            self.close_connection = True
            raise refused("`Content-Length` is missing.", 411)
        if int(length) > MAX_REQUEST:
            self.close_connection = True
            raise refused(
                f"A request has at most {MAX_REQUEST} bytes. Received: "
                f"{length}",
                413,
            )
        return self.rfile.read(int(length))

    def send_bytes(self, status, data, content_type):
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Says nothing on standard error."""
