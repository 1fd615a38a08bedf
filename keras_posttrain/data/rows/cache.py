"""The cache of tokenized rows: its keys, its files and their removal."""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import os
import pathlib
import pickle
import time
import uuid

import jinja2
import tokenizers

from keras_posttrain import _cache, _console
from keras_posttrain.data.rows import reading
from keras_posttrain.data.rows.store import Damaged, StoredExamples

# Fewer rows are tokenized before their tokenizer is hashed.
MIN_ROWS = 64
# Files that no run has used for so long are removed, and the oldest ones
# where all together are larger. What a killed run was writing stays a day.
DAY = 24 * 3600
MAX_DAYS = 30
MAX_BYTES = 64 * 2**30
LOCKS = 64
SUFFIX = ".rows"


class Entry:
    """The file of some rows and settings, which may not exist yet.

    Args:
        directory: `pathlib.Path`.
        key: string, a hash of the content of the rows and of all that their
            examples depend on.
    """

    def __init__(self, directory, key):
        self.path = directory / f"{key}{SUFFIX}"
        self._lock = directory / f"lock-{int(key[:8], 16) % LOCKS:02d}"

    @classmethod
    def of(cls, rows, preparation):
        """Finds the entry of rows that a `Preparation` prepares.

        Returns:
            An `Entry`, or `None` where the cache is off or the rows have no
            content that can be hashed.
        """
        root = _cache.directory()
        if root is None or preparation.key is None or len(rows) < MIN_ROWS:
            return None
        settings = (*_versions(), *_today(preparation), preparation.key)
        try:
            key = hashlib.blake2b(reading.bytes_of(settings), digest_size=16)
            key.update(digest_of_rows(rows))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError):
            return None
        except RecursionError:
            return None
        return cls(root / "rows", key.hexdigest())

    @contextlib.contextmanager
    def locked(self):
        """Lets one process of several prepare the same rows."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self._lock, "ab"))
                _take(file)
            yield

    def read(self, restore):
        """Returns the `StoredExamples`, or `None` where they must be made."""
        try:
            found = StoredExamples(self.path, restore)
            # The time of the last use.
            os.utime(self.path)
            return found
        except Damaged:
            self.path.unlink(missing_ok=True)
        except OSError:
            pass
        return None

    def new_path(self):
        """Returns the path of a file that `keep` makes the entry's."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f"{uuid.uuid4().hex}.new")

    def keep(self, path):
        """Makes a finished file the entry's, and removes old ones."""
        os.replace(path, self.path)
        _remove_old(self.path)


def _take(file):
    """Locks a file; the lock ends with this process, however it does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _console.say("Waiting for another process that prepares these rows.")
        fcntl.flock(file, fcntl.LOCK_EX)


def _remove_old(kept):
    """Removes old files, all but one."""
    now = time.time()
    oldest = {SUFFIX: now - MAX_DAYS * DAY, ".new": now - DAY}
    files = []
    for path in kept.parent.iterdir():
        with contextlib.suppress(OSError):
            if path.suffix in oldest and path != kept:
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
    total = kept.stat().st_size
    for when, size, path in sorted(files, reverse=True):
        total += size
        if when < oldest[path.suffix] or (
            total > MAX_BYTES and path.suffix == SUFFIX
        ):
            path.unlink(missing_ok=True)


def _today(preparation):
    """Returns the date where the chat template may write it."""
    tokenizer = preparation.settings.tokenizer
    template = tokenizer and tokenizer.chat_template or ""
    dated = "strftime_now" in template
    return [datetime.date.today().isoformat()] if dated else []


@functools.cache
def _versions():
    """Returns all code that makes examples of rows."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest(), tokenizers.__version__, jinja2.__version__


def digest_of_rows(rows):
    """Returns a hash of the content of rows, 16 bytes.

    Files and Arrow tables are hashed as they are, other rows by their pickle.
    """
    if own := getattr(rows, "content_digest", None):
        return own()
    digest = hashlib.blake2b(digest_size=16)
    if reading.is_hugging_face(rows):
        parts = reading.arrow_bytes(rows)
    else:
        parts = map(reading.bytes_of, reading.parts(rows))
    for part in parts:
        digest.update(part)
    return digest.digest()
