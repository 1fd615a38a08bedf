"""The command line: `python -m keras_posttrain sft --preset ... --data ...`.

A command is written as the Python script that does the same, which is shown
and run. So it has no behaviour of its own: arguments, errors and results are
those of the public API.
"""

import argparse
import difflib
import linecache
import os
import pathlib
import sys
import traceback

from keras_posttrain import _command_line, _console
from keras_posttrain.distribution import processes

NAME = "python -m keras_posttrain"
SCRIPT = "<the script above>"
PACKAGE = str(pathlib.Path(__file__).parent)
# The status of a run that failed, was called wrongly, or was interrupted.
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that knows the options of one command, and names the nearest.

    Args:
        name: str, the command.
        command: `_command_line.Command`.
    """

    def __init__(self, name, command):
        super().__init__(
            prog=f"{NAME} {name}", allow_abbrev=False, exit_on_error=False
        )
        self.name, self.command = name, command
        for option in command.options:
            self.add_argument(f"--{option.name}", **option.parsed)

    def format_help(self):
        return _command_line.help_of(f"{NAME} {self.name}", self.command)

    def error(self, message):
        raise ValueError(f"{message} See `{self.prog} --help`.")

    def read(self, arguments):
        """Returns the options that were given, a dict by name.

        Raises:
            ValueError: for an unknown, a missing or an incomplete option.
        """
        try:
            found, unknown = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            self.error(f"{error}.")
        if unknown:
            names = [f"--{option.name}" for option in self.command.options]
            self.error(_unknown("option", unknown[0].split("=")[0], names))
        given = {k.replace("_", "-"): v for k, v in vars(found).items()}
        return {k: v for k, v in given.items() if v is not None}


def main(arguments):
    """Runs a command, and returns the status that the process ends with."""
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            _console.say(_command_line.overview(NAME))
            return 0 if arguments else REFUSED
        if arguments[0] == "--version":
            package = sys.modules[__package__]
            _console.say(f"{__package__} {package.__version__}")
            return 0
        name, *rest = arguments
        if name not in _command_line.COMMANDS:
            message = _unknown("command", name, _command_line.COMMANDS)
            raise ValueError(f"{message} See `{NAME} --help`.")
        command = _command_line.COMMANDS[name]
        given = Parser(name, command).read(rest)
        only_print = given.pop("print-script", False)
        script = _command_line.script(command, given)
    except (ValueError, ImportError) as error:
        return _say_error(error, REFUSED)
    if only_print:
        _console.say(script.rstrip("\n"))
        return 0
    return _run(script)


def _unknown(kind, name, known):
    """Returns the message on a name that is not known."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"There is no {kind} '{name}'.{hint}"


def _run(script):
    """Shows and runs a script, and returns the status."""
    if processes.is_first():
        lines = [f"    {line}".rstrip() for line in script.splitlines()]
        _console.say("\n".join(lines) + "\n")
    # So that tracebacks show its lines.
    linecache.cache[SCRIPT] = (
        len(script), None, script.splitlines(keepends=True), SCRIPT
    )  # fmt: skip
    try:
        exec(compile(script, SCRIPT, "exec"), {"__name__": "__main__"})
    except KeyboardInterrupt:
        _console.say(
            "Interrupted. The same command resumes from the last checkpoint."
        )
        return INTERRUPTED
    except (ValueError, TypeError, ImportError) as error:
        if not _explains_itself(error):
            raise
        return _say_error(error, REFUSED)
    except (OSError, FloatingPointError) as error:
        if not _explains_itself(error):
            raise
        return _say_error(error, FAILED)
    return 0


def _explains_itself(error):
    """Returns whether an error is this library's, about what was passed.

    One of a user's function is not: where it was raised must be seen. Nor is
    a `TypeError` that was not raised by a call in the script.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, TypeError) and frames[-1].filename != SCRIPT:
        return False
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if _is_users(frame.filename):
                return False
        error = error.__cause__ or error.__context__
    return True


def _is_users(file):
    """Returns whether a file is neither the package's nor installed."""
    if file.startswith((PACKAGE, "<")):
        return False
    return not any(
        os.path.abspath(file).startswith(os.path.abspath(folder) + os.sep)
        for folder in (*_installed(), os.path.dirname(os.__file__))
    )


def _installed():
    """Returns the folders of installed packages."""
    return [f for f in sys.path if f.endswith(("-packages",))]


def _say_error(error, status):
    print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
