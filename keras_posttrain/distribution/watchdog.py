"""Processes that notice at once when one of them is lost.

What spans the devices of all processes waits for all of them, some of it for
ever. The first process keeps a connection to each of the others: the operating
system closes it with the process. Where a whole host goes, JAX's heartbeat
ends the others after 100 seconds.
"""

import atexit
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time

import jax
from jax._src.distributed import global_state

from keras_posttrain.distribution import exit_message, processes

# Seconds in which processes that all fail in the same way say so themselves.
GRACE = 5.0
CONNECT_SECONDS = 60.0


class Peers:
    """Watches over the other processes, from `start` to `stop`.

    Args:
        directory: str, where checkpoints are, or `None`.
    """

    def __init__(self, directory=None):
        self.directory, self.step = directory, 0
        self._names = {}  # process by connection
        self._failed = threading.Event()
        self._others_gone = threading.Event()
        self._ends = False

    def start(self):
        """Connects; all processes must do so together.

        Where a network lets them not, JAX's heartbeat alone watches.
        """
        # Its words go out even where all of the group are signalled.
        self._speaker = subprocess.Popen(
            [sys.executable, "-S", exit_message.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._selector = selectors.DefaultSelector()
        server = port = token = None
        if processes.is_first():
            server = socket.create_server(("", 0))
            port, token = server.getsockname()[1], secrets.token_hex(16)
        port, token = processes.from_first([port, token])
        error = None
        try:
            if server is not None:
                self._accept(server, token)
            else:
                self._connect(port, token)
        except OSError as e:
            error = f"process {processes.index()}: {e}"
        errors = [e for e in processes.exchange(error) if e is not None]
        if errors:
            self._ends = True
            if processes.is_first():
                print(
                    "Processes cannot watch over each other "
                    f"({errors[0]}); JAX ends those that have lost one "
                    "after 100 seconds.",
                    flush=True,
                )
        threading.Thread(target=self._watch, daemon=True).start()

    def _accept(self, server, token):
        end = time.monotonic() + CONNECT_SECONDS
        with server:
            while len(self._names) < processes.count() - 1:
                server.settimeout(max(end - time.monotonic(), 0.1))
                one, _ = server.accept()
                one.settimeout(CONNECT_SECONDS)
                # Unbuffered: what follows is read elsewhere.
                with one.makefile("rb", buffering=0) as file:
                    theirs, _, process = file.readline(100).partition(b" ")
                if secrets.compare_digest(theirs, token.encode()):
                    self._add(one, int(process))
                else:
                    one.close()  # a stranger

    def _connect(self, port, token):
        host = global_state.coordinator_address.rsplit(":", 1)[0]
        one = socket.create_connection(
            (host.strip("[]"), port), CONNECT_SECONDS
        )
        one.sendall(f"{token} {processes.index()}\n".encode())
        self._add(one, 0)

    def _add(self, one, process):
        one.settimeout(None)
        self._names[one] = process
        self._selector.register(one, selectors.EVENT_READ, [])

    def tell(self, step):
        """What step was done: for what is said when all ends."""
        self.step = step
        self._speak(
            f"Process {processes.index()} of {processes.count()} ended: it "
            "was killed or ran out of memory, or JAX ended it because "
            "another process was lost.",
        )

    def fail(self, error):
        """Tells the others of an error, which is about to be raised here.

        Where they do not fail as well, they end, and this process does not
        wait for them when it ends.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Rather the loss that it may come from is told of.
            time.sleep(1.0)
        self._ends = True
        text = f"{type(error).__name__}: {error}"
        self._send(failed=processes.index(), text=text[:2000])
        self._speak(None)
        limit = time.monotonic() + 2 * GRACE
        while time.monotonic() < limit and not self._failed.is_set():
            if self._others_gone.wait(0.1):
                # JAX would wait for them.
                atexit.register(_leave)
                break

    def stop(self):
        """All is well: what happens to the others is no loss any more."""
        self._ends = True
        self._send(bye=True)
        self._speak(None)
        self._speaker.stdin.close()
        self._speaker.wait()

    # What the others say

    def _watch(self):
        while self._names:
            for key, _ in self._selector.select():
                process = self._names[key.fileobj]
                try:
                    data = key.fileobj.recv(4096)
                except OSError:
                    data = b""
                if not data:
                    self._drop(key.fileobj)
                    self._lost(process)
                    continue
                key.data.append(data)
                *lines, rest = b"".join(key.data).split(b"\n")
                key.data[:] = [rest]
                for line in lines:
                    said = json.loads(line)
                    if "bye" in said:
                        self._drop(key.fileobj)
                    elif "failed" in said:
                        self._heard(**said)
                    else:
                        self._end(said["lost"])

    def _drop(self, one):
        self._selector.unregister(one)
        one.close()
        del self._names[one]

    def _lost(self, process):
        if self._ends:
            self._others_gone.set()
            return
        self._end(
            f"Process {process} of {processes.count()} was lost: it was "
            "killed, ran out of memory, or its host is gone."
        )

    def _heard(self, failed, text):
        self._failed.set()
        for one, process in list(self._names.items()):
            if processes.is_first() and process != failed:
                _send(one, failed=failed, text=text)

        def end_unless_failing():
            if not self._ends:
                self._end(
                    f"Process {failed} of {processes.count()} stopped: {text}."
                )

        timer = threading.Timer(GRACE, end_unless_failing)
        timer.daemon = True
        timer.start()

    def _end(self, what):
        """Says what happened and ends this process, whose main thread may
        wait for a lost one for ever."""
        if processes.is_first():
            self._send(lost=what)
        self._speak(None)
        text = exit_message.message(what, self.step, self.directory)
        print("\n" + text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)

    # What is said to them

    def _send(self, **said):
        for one in list(self._names):
            _send(one, **said)

    def _speak(self, what):
        words = None
        if what is not None:
            words = dict(what=what, step=self.step, directory=self.directory)
        try:
            self._speaker.stdin.write(json.dumps(words).encode() + b"\n")
            self._speaker.stdin.flush()
        except OSError:
            pass  # what would have spoken for it has ended before


def _line(**said):
    return json.dumps(said).encode() + b"\n"


def _send(one, **said):
    try:
        one.sendall(_line(**said))
    except OSError:
        pass  # its loss is told of elsewhere


def _leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
