"""Work of the first process in which the others take part when asked."""

import collections

from keras_posttrain.distribution import processes

# What the first process sends when its work has ended.
END = "end"
# Errors that all processes raise as the class that one raised.
ERRORS = (ValueError, ImportError, OSError, RuntimeError)


class Led:
    """Runs functions in the first process, with the help of the others.

    The first process decides when all are needed, for example to gather
    arrays that span their devices. The others wait for that, so that they
    need not know what it decides by. What one raises, all raise.

    Args:
        errors: classes of further exceptions that all processes raise as
            they are. Those of other classes are `RuntimeError`s where they
            were not raised first.

    Example:

    ```python
    led = Led()
    led.add("arrays", lambda: (to_host(x) for x in arrays))

    def write():
        for array in led.together("arrays"):
            array.tofile(file)
        return file.tell()

    size = led.run(write)  # in all processes; the first one writes
    ```
    """

    def __init__(self, *errors):
        self._errors = {e.__name__: e for e in (*errors, *ERRORS)}
        self._helps, self._open = {}, ()

    def add(self, name, function):
        """Adds what all processes do together.

        Args:
            name: str.
            function: function of arguments that JSON can encode to an
                iterable. Each process consumes it completely.
        """
        self._helps[name] = function

    def together(self, name, *args):
        """Calls an added function in all processes and returns its iterable.

        Only inside of a function that `run` calls.
        """
        if processes.count() == 1:
            return self._helps[name](*args)
        self._exhaust()
        processes.exchange([name, *args])
        self._open = iter(self._helps[name](*args))
        return self._open

    def run(self, function):
        """Returns the first process's `function()` in all processes.

        Args:
            function: function without arguments, called in the first process
                only, that returns a value that JSON can encode.

        Raises:
            Exception: in all processes, what one of them raised. In the
                others its class is among `errors` and the built-in ones
                above, and its text is the same.
        """
        if processes.count() == 1:
            return function()
        if processes.is_first():
            result = error = None
            try:
                try:
                    result = function()
                finally:
                    self._exhaust()
            except Exception as e:  # Any: the others wait for the end.
                error = e
            values = processes.exchange([END, result, self._text(error)])
        else:
            values, error = self._help()
        self._raise_any([values[0][2], *values[1:]], error)
        return values[0][1]

    def agree(self, error):
        """Raises an exception in all processes if one of them has one.

        Args:
            error: this process's exception, or `None`.
        """
        if processes.count() > 1:
            self._raise_any(processes.exchange(self._text(error)), error)
        elif error is not None:
            raise error

    def _help(self):
        """Takes part until the first process has ended its work.

        Returns:
            What all have sent at the end, and this process's exception or
            `None`.
        """
        error = None
        while True:
            values = processes.exchange(self._text(error))
            name, *args = values[0]
            if name == END:
                return values, error
            try:
                collections.deque(self._helps[name](*args), maxlen=0)
            except Exception as e:  # Any: it is raised at the end.
                error = error or e

    def _exhaust(self):
        """Consumes what all processes consume together."""
        opened, self._open = self._open, ()
        collections.deque(opened, maxlen=0)

    def _text(self, error):
        """Returns the name and the text of an exception, or `None`."""
        if error is None:
            return None
        names = (n for n, e in self._errors.items() if isinstance(error, e))
        name = next(names, None)
        if name is None:
            return RuntimeError.__name__, f"{type(error).__name__}: {error}"
        return name, str(error)

    def _raise_any(self, texts, error):
        """Raises the exception of the first process that has one.

        Args:
            texts: list of what `_text` returns, one a process.
            error: this process's exception, or `None`.
        """
        index = next((i for i, x in enumerate(texts) if x is not None), None)
        if index is None:
            return
        if index == processes.index():
            raise error
        name, text = texts[index]
        raise self._errors[name](text) from error
