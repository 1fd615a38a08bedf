"""The tool with which a model runs Python code."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import pwd
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time

from keras_posttrain._cores import num_cores
from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.rewards.answers import check_seconds
from keras_posttrain.rewards.lengths import check_count

SCRIPT = pathlib.Path(__file__).with_name("python_child.py")
# The most seconds until the code's process is started.
START_SECONDS = 60
# The most seconds in which it ends by itself, once the code has.
GRACE = 2.0
MAX_FILES = 256
# More calls at once wait: their time limits would be of no meaning.
_running = threading.BoundedSemaphore(4 * num_cores())


@dataclasses.dataclass(frozen=True)
class Python:
    """A tool that runs the code of a model, each call in a new interpreter.

    The code runs in a process of its own, in an empty folder that is deleted
    afterwards, without input and without the environment variables of this
    process. It and all that it starts are killed when it ends or a limit is
    reached. The call returns what was printed, and how it ended if not well:
    nothing that the code does raises an exception here.

    On Linux, where the kernel allows it, the code has no network, sees no
    other processes, can write to its own folder only, and does not see the
    user's home folder. `isolation` names what holds. Code that root runs
    becomes another user's, where that user can read the Python installation.

    This keeps an honest model from harm. It is no security boundary against
    an attacker who is determined: for that, use a virtual machine. Without
    isolation the code may do all that the user may do.

    Args:
        seconds: float, the time limit of a call, and of the processor time
            of each of its processes.
        max_bytes: int, the memory that each process may allocate (of
            addresses; it is not limited on macOS).
        max_processes: int, the processes and threads that the code may start.
        max_file_bytes: int, the size of a file, and with isolation that of
            all files.
        max_output_bytes: int, what the code may print before it is killed.
        isolate: bool, whether to separate the code if the kernel allows it.

    Raises:
        EpisodeError: by a call whose process cannot be started.

    Example:

    ```python
    tool = kpt.episodes.Python(seconds=2)
    tool("print(6 * 7)")  # "42"
    tool("import time; time.sleep(9)")  # "error: took longer than 2 s"
    ```
    """

    seconds: float = 5.0
    max_bytes: int = 2**29
    max_processes: int = 32
    max_file_bytes: int = 2**26
    max_output_bytes: int = 2**20
    isolate: bool = True
    limits_itself = True

    def __post_init__(self):
        check_seconds("seconds", self.seconds)
        for field in dataclasses.fields(self):
            if field.type is int:
                check_count(field.name, getattr(self, field.name), 1)
        # As of a function: what the model is told of the tool.
        object.__setattr__(self, "__name__", "python")
        object.__setattr__(self, "__doc__", type(self).__call__.__doc__)
        hints = type(self).__call__.__annotations__
        object.__setattr__(self, "__annotations__", hints)

    def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints.

        Args:
            code: a program. It does not see the variables of earlier calls.
        """
        return self._run(code)[0]

    @functools.cached_property
    def isolation(self):
        """What the code is separated from on this machine, by a trial.

        Frozenset of `"network"`, `"processes"`, `"files"` and `"user"`.
        """
        return frozenset(self._run("")[1]["isolation"])

    def _run(self, code):
        """Runs code; returns the text and the dict that the child reports."""
        try:
            with (
                _running,
                tempfile.TemporaryDirectory(
                    prefix="kpt_", ignore_cleanup_errors=True
                ) as folder,
            ):
                with open(os.path.join(folder, "main.py"), "wb") as file:
                    file.write(code.encode(errors="replace"))
                output, reports, stopped = self._communicate(folder)
        except OSError as error:
            raise EpisodeError(f"No process for code: {error}") from error
        if "error" in reports or "isolation" not in reports:
            reason = reports.get("error", "the process did not start")
            raise EpisodeError(f"No process for code: {reason}")
        # The folder has a new name each time.
        text = output.decode(errors="replace").replace(reports["folder"], ".")
        ending = stopped or self._ending(reports.get("status"))
        lines = [text.rstrip("\n")] if text else []
        lines += [f"error: {ending}"] if ending else []
        return "\n".join(lines) or "(no output)", reports

    def _ending(self, status):
        if status is None:
            return "the process was killed"
        if status == -signal.SIGXCPU:
            return f"used more than {self._cpu_seconds} s of processor time"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(-status).name}"
            return f"ended by signal {-status}"
        return f"exit status {status}" if status else None

    @property
    def _cpu_seconds(self):
        return math.ceil(self.seconds)

    def _communicate(self, folder):
        """Runs `main.py` of a folder.

        Returns:
            Tuple of the output, bytes; the dict that the child reports; and
            why it was stopped, a string or `None`.
        """
        read_from, report_to = os.pipe()
        with open(read_from, "rb", buffering=0) as reports:
            try:
                process = self._start(folder, report_to)
            finally:
                os.close(report_to)
            with process:
                reader = _Reader(process.stdout, reports)
                try:
                    stopped = reader.read(self.seconds, self.max_output_bytes)
                finally:
                    # It ends its children first, so that none is left.
                    # `process.terminate` might wait for it, and the number
                    # of its group could be another's.
                    os.kill(process.pid, signal.SIGTERM)
                    reader.wait(GRACE)
                    with contextlib.suppress(PermissionError):
                        # As macOS says of processes that have ended.
                        os.killpg(process.pid, signal.SIGKILL)
                reader.drain(self.max_output_bytes)
        return bytes(reader.output), reader.values(), stopped

    def _start(self, folder, report_to):
        prefixes = sys.prefix, sys.base_prefix
        binary = pathlib.Path(sys.executable).resolve()
        settings = {
            "report_to": report_to,
            "isolate": self.isolate,
            "homes": sorted(_homes()),
            "keep": [
                *prefixes,
                *map(os.path.realpath, prefixes),
                str(binary.parent.parent),
            ],
            "bytes": self.max_bytes,
            "cpu_seconds": self._cpu_seconds,
            "file_bytes": self.max_file_bytes,
            "files": MAX_FILES,
            "processes": self.max_processes,
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(SCRIPT), json.dumps(settings)],
            cwd=folder,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                # The same code prints the same, and all before it is killed.
                "PYTHONHASHSEED": "0",
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                # Threads reserve addresses, which are limited.
                "MALLOC_ARENA_MAX": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[report_to],
            start_new_session=True,
        )


def _homes():
    """The user's home folders, by the environment and by the system."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes = {os.path.realpath(home) for home in homes}
    return {home for home in homes if os.path.isdir(home)} - {"/"}


class _Reader:
    """Reads the two pipes of a process."""

    def __init__(self, stdout, reports):
        self.stdout, self.reports = stdout, reports
        self.output, self.reported = bytearray(), bytearray()
        for file in (stdout, reports):
            os.set_blocking(file.fileno(), False)

    def values(self):
        """Returns the dict of all that was reported."""
        merged = {}
        for line in self.reported.splitlines():
            merged |= json.loads(line)
        return merged

    def read(self, seconds, max_bytes):
        """Reads until the code ended; returns a limit that was reached."""
        state, ended, deadline = b"", False, time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            for file, data in (
                (self.stdout, self.output),
                (self.reports, self.reported),
            ):
                selector.register(file, selectors.EVENT_READ, data)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    chunk = os.read(key.fd, 2**16)
                    key.data.extend(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                if len(self.output) > max_bytes:
                    return f"printed more than {max_bytes} bytes"
                if self.reports not in selector.get_map():
                    return None
                if state != self.reported:
                    # The time to start and to end is not the code's.
                    ended = b'{"status"' in self.reported
                    left = GRACE if ended else seconds
                    deadline = time.monotonic() + left
                    state = bytes(self.reported)
        return None if ended else f"took longer than {seconds:g} s"

    def wait(self, seconds):
        """Waits until the processes that report have ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports, selectors.EVENT_READ)
            while selector.select(seconds):
                chunk = os.read(self.reports.fileno(), 2**16)
                self.reported.extend(chunk)
                if not chunk:
                    break

    def drain(self, max_bytes):
        """Reads what is left of the output."""
        with contextlib.suppress(BlockingIOError):
            while len(self.output) <= max_bytes:
                chunk = os.read(self.stdout.fileno(), 2**16)
                if not chunk:
                    break
                self.output.extend(chunk)
        del self.output[max_bytes:]


python = Python()
