"""A message from a process that ends without running Python code.

This file is also the script of the child process that prints the message. It
uses the standard library only, so that the child starts at once.
"""

import json
import os
import subprocess
import sys


class ExitMessage:
    """Prints how to resume a run if this process is killed or aborted.

    JAX aborts a process that has lost another one from within C++, and a
    killed process cannot print anything. Therefore a child process prints the
    message when its standard input ends.

    Args:
        process: str, the name of this process in the message.
        directory: str, where checkpoints are stored, or `None`.
        local: bool, whether machines have local checkpoints too.
    """

    def __init__(self, process, directory=None, local=False):
        self._fields = {
            "process": process,
            "directory": directory,
            "local": local,
        }
        # A session of its own, so that a signal to the process group does
        # not reach the child.
        self._child = subprocess.Popen(
            [sys.executable, "-S", __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def update(self, step):
        """Sets the number of steps that are done."""
        self._send({**self._fields, "step": step})

    def cancel(self):
        """Ends the child process; nothing is printed."""
        self._send(None)
        self._child.stdin.close()
        self._child.wait()

    def _send(self, fields):
        try:
            self._child.stdin.write(json.dumps(fields).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            pass  # The child has ended, and training continues without it.


def message(process, step, directory, local=False):
    """Returns the text that `ExitMessage` prints."""
    steps = []
    if directory is not None and os.path.isdir(directory):
        steps = [int(n) for n in os.listdir(directory) if n.isdigit()]
    if directory is not None and "://" in directory:
        restart = "it resumes from its last checkpoint"
    elif steps:
        restart = f"it resumes from the checkpoint of step {max(steps)}"
    elif directory is not None:
        restart = "it starts from the beginning, as no checkpoint was saved"
    else:
        restart = (
            "it starts from the beginning; with "
            "`kpt.callbacks.Checkpoint(directory)` it would resume"
        )
    if local:
        restart += (
            ", or from a newer local checkpoint if the machines that then run "
            "it have all of its parts"
        )
    return (
        f"{process} ended at step {step}. It was killed or ran out of "
        "memory, or JAX ended it because another process was lost, which the "
        "log of JAX above names. Start the script again in all processes: "
        f"{restart}."
    )


def main():
    """Prints the message of the last line of JSON on standard input."""
    fields = None
    for line in sys.stdin:
        fields = json.loads(line)
    if fields is not None:
        print("\n" + message(**fields), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
