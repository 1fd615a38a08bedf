"""What is said when a process of several ends without a word.

Run as a script, it reads lines of JSON, the arguments of `message`, and says
the last of them once its input ends: JAX ends a process that has lost another
from within C++, and nobody can speak for one that was killed. Standard
library only, so that it starts at once.
"""

import json
import os
import sys


def message(what, step, directory):
    """What happened, and how the run goes on.

    Args:
        what: str, a sentence.
        step: int, the steps that were done.
        directory: str, where checkpoints are, or `None`.

    Returns:
        Str.
    """
    steps = []
    if directory is not None and os.path.isdir(directory):
        steps = [int(n) for n in os.listdir(directory) if n.isdigit()]
    if steps:
        how = f"it goes on from the checkpoint of step {max(steps)}"
    elif directory is not None:
        how = "it begins anew, as there is no checkpoint yet"
    else:
        how = (
            "it begins anew; with `kpt.callbacks.Checkpoint(directory)` it "
            "would go on"
        )
    return (
        f"{what} The run stops after step {step}: no process can train "
        f"without the others. Start the script again in all processes: {how}."
    )


def main():
    last = None
    for line in sys.stdin:
        last = json.loads(line)
    if last is not None:
        print("\n" + message(**last), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
