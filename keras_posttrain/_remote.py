"""Files at addresses such as `gs://bucket/run` and `s3://bucket/rows.jsonl`.

What is read is copied to this machine first, and what is written is copied
from there, by fsspec, which knows the protocols.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
import uuid

from keras_posttrain import _cache, _console

ADDRESS = re.compile(r"([a-z][a-z0-9+]*)://")
# What `pathlib.Path` makes of an address has one slash.
PATH_OF_ADDRESS = re.compile(r"(gs|gcs|s3|s3a|az|abfs|abfss|https?):/[^/]")
# Protocols whose folders are parts of names.
BUCKETS = {"gs", "gcs", "s3", "s3a", "az", "abfs", "abfss"}
# Parts of names of files that are not complete.
UNFINISHED = (".tmp", ".orbax-checkpoint-tmp")
# The file of a checkpoint that is copied last: without it there is none.
LAST = "_CHECKPOINT_METADATA"
DAY = 24 * 3600
# The file at an address that names the process whose run writes there.
OWNER = ".keras_posttrain-run"
_OWN = uuid.uuid4().hex.encode()
# Bytes from which a copy is announced.
LARGE = 2**28


def is_address(path):
    """Returns whether a path is on another machine, such as `"gs://..."`.

    Raises:
        ValueError: it is what `pathlib.Path` makes of an address.
    """
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = os.fspath(path)
    if isinstance(text, bytes):
        return False
    if PATH_OF_ADDRESS.match(text):
        scheme, rest = text.split(":/", 1)
        raise ValueError(
            "`pathlib.Path` makes a local path of an address. Pass the string "
            f"{scheme + '://' + rest!r}. Received: {path!r}"
        )
    return ADDRESS.match(text) is not None


def _opened(address):
    """Returns fsspec's file system of an address, and the path in it."""
    # Slow to import, and only needed for addresses.
    import fsspec

    try:
        return fsspec.url_to_fs(os.fspath(address))
    except ImportError as error:
        raise ValueError(
            f"The address {os.fspath(address)!r} needs another package: "
            '`pip install "keras_posttrain[remote]"` installs those of gs:// '
            f"and s3://. ({error})"
        ) from error
    except ValueError as error:
        raise ValueError(
            "An address must begin with a protocol that fsspec knows, such "
            f"as gs://, s3:// or az://. Received: {os.fspath(address)!r} "
            f"({error})"
        ) from error


def _protocols(fs):
    return (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol


def _files(fs, path):
    """Returns what fsspec knows of each file at a path, by relative name.

    The name of a path that is a file is "".
    """
    fs.invalidate_cache()
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return {}
    if info["type"] == "file":
        return {"": info}
    found = fs.find(path, detail=True)
    start = len(path.rstrip("/")) + 1
    return {name[start:]: found[name] for name in sorted(found)}


def matches(address):
    """Returns the addresses of the files that a pattern matches, sorted.

    An address of the web is no pattern.
    """
    fs, path = _opened(address)
    if _is_of_the_web(address):
        return [address]
    fs.invalidate_cache()
    found = fs.glob(path, detail=True)
    return [
        fs.unstrip_protocol(name)
        for name in sorted(found)
        if found[name]["type"] == "file"
    ]


def _is_of_the_web(address):
    return os.fspath(address).startswith(("http://", "https://"))


def local_copy(address):
    """Copies a file or a folder to this machine, if it has changed since.

    Copies are in the user's cache (see `_cache.directory`), or in a temporary
    folder if it is off. Earlier versions are removed after a day.

    Returns:
        The `pathlib.Path` of the copy, with the name of the original.

    Raises:
        FileNotFoundError: there is nothing.
    """
    fs, path = _opened(address)
    files = _files(fs, path)
    if not files:
        doubt = ""
        if _is_of_the_web(address):
            doubt = ", or its server cannot be reached"
        raise FileNotFoundError(
            f"There is nothing at {os.fspath(address)!r}{doubt}"
        )
    root = _cache.directory()
    if root is None:
        root = pathlib.Path(tempfile.gettempdir(), "keras_posttrain")
    versions = root / "remote" / _digest(os.fspath(address))
    content = sorted(
        (k, sorted(map(str, v.items()))) for k, v in files.items()
    )
    folder = versions / _digest(repr(content))
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if _is_of_the_web(address):
        # Without what follows the name, such as a signature.
        name = name.split("?")[0].split("#")[0]
    copy = folder / (name or "file")
    if not folder.exists():
        versions.mkdir(parents=True, exist_ok=True)
        _copy(fs, path, files, copy, versions)
    os.utime(folder)
    for other in versions.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > DAY:
                shutil.rmtree(other)
    return copy


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _copy(fs, path, files, copy, versions):
    """Copies files to a folder that appears when it is complete."""
    size = sum(info.get("size") or 0 for info in files.values())
    if size >= LARGE:
        _console.say(f"Copying {path} ({size / 2**30:.1f} GiB) ...")
    with tempfile.TemporaryDirectory(
        dir=versions, ignore_cleanup_errors=True
    ) as temporary:
        target = pathlib.Path(temporary, "copy", copy.name)
        names = [name for name in files if not name.endswith("/")]
        targets = [target / name if name else target for name in names]
        for one in targets:
            one.parent.mkdir(parents=True, exist_ok=True)
        sources = [files[name]["name"] for name in names]
        fs.get(sources, [str(one) for one in targets])
        with contextlib.suppress(OSError):
            # Another process may have made the same copy meanwhile.
            os.rename(target.parent, copy.parent)
    if not copy.parent.exists():
        raise OSError(f"{path!r} could not be copied to {str(copy.parent)!r}")


class Mirror:
    """A folder of this machine whose changes are copied to an address.

    Args:
        address: str, that of a folder, which need not exist.
        folder: `pathlib.Path`, which is made when something is pulled.
    """

    def __init__(self, address, folder):
        self.address, self.folder = address.rstrip("/"), folder
        self._fs, self._path = _opened(self.address)
        # By relative name, the time and the size of what is at the address.
        self._known = {}
        self._lock = threading.Lock()

    def check(self):
        """Raises what the storage does if nothing can be written to it."""
        # Processes of several containers may have the same number.
        probe = f"{self._path}/.keras_posttrain-{uuid.uuid4().hex}"
        if not BUCKETS.intersection(_protocols(self._fs)):
            # Of a bucket it would make one.
            self._fs.makedirs(self._path, exist_ok=True)
        self._fs.pipe_file(probe, b"1")
        self._fs.rm_file(probe)

    def pull(self, *names):
        """Copies files and folders of these names, if they exist.

        Of folders with the steps of a checkpoint, complete ones are copied.
        """
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            for top in names:
                files = _files(self._fs, f"{self._path}/{top}")
                partial = _incomplete(files)
                for name, info in files.items():
                    if name.endswith("/") or name.split("/")[0] in partial:
                        continue
                    relative = f"{top}/{name}" if name else top
                    target = self.folder / relative
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(info["name"], str(target))
                    self._known[relative] = _state(target)

    def stand_in(self, *names):
        """Makes an empty file for each one at the address.

        Those of these names are copied.
        """
        with self._lock:
            for relative in _files(self._fs, self._path):
                target = self.folder / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
                self._known[relative] = _state(target)
        self.pull(*(n for n in names if n in self._known))

    def push(self):
        """Copies what has changed to the address, and removes what is gone."""
        with self._lock:
            while True:
                found = self._found()
                try:
                    self._copy(found)
                    break
                except FileNotFoundError:
                    # A checkpoint may be removed while it is copied.
                    if all((self.folder / name).exists() for name in found):
                        raise
            self._remove(found)

    def _found(self):
        """Returns the states of the files that are complete, by name."""
        found = {}
        # It passes over folders that are removed meanwhile.
        for top, _, names in os.walk(self.folder):
            for path in (pathlib.Path(top, name) for name in names):
                relative = path.relative_to(self.folder).as_posix()
                if any(part in relative for part in UNFINISHED):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found[relative] = _state(path)
        return dict(sorted(found.items()))

    def _copy(self, found):
        changed = [n for n in found if found[n] != self._known.get(n)]
        for last in (False, True):
            these = [n for n in changed if n.endswith(LAST) == last]
            if these:
                # Some may be there even if it fails.
                self._known |= dict.fromkeys(these)
                self._fs.put(
                    [str(self.folder / name) for name in these],
                    [f"{self._path}/{name}" for name in these],
                )
            self._known |= {name: found[name] for name in these}

    def _remove(self, found):
        gone = sorted(
            set(self._known) - set(found),
            key=lambda name: not name.endswith(LAST),
        )
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}")
            del self._known[name]


class OtherRun(RuntimeError):
    """Another run has begun to write to an address."""


class Owner:
    """Notices at an address that another run has begun to write there.

    Storage of objects has no locks. Each run that saves there writes its name
    to a file when it begins; the others find that name, and stop. So does a
    run on a machine that was given up and that still trains.
    """

    def __init__(self, address):
        self._address = address.rstrip("/")
        self._fs, path = _opened(self._address)
        self._file = f"{path}/{OWNER}"
        # A file that is removed later is no other run.
        self._accepted = {_OWN, None, self._read()}

    def take(self):
        """Makes this process's run the one that writes."""
        self._fs.pipe_file(self._file, _OWN)
        self._accepted = {_OWN, None}

    def check(self):
        """Raises an `OtherRun` error if one of another process has begun."""
        owner = self._read()
        if owner == _OWN:
            # An earlier owner that begins again is another run.
            self._accepted = {_OWN, None}
        if owner not in self._accepted:
            raise OtherRun(
                f"Another run has begun to write to {self._address!r} since "
                "this one did, so this one writes nothing more there. Stop "
                "one of the two, or use another address."
            )

    def _read(self):
        try:
            return self._fs.cat_file(self._file)
        except FileNotFoundError:
            return None


def _incomplete(files):
    """Returns the folders of steps that lack the file that is copied last."""
    steps = {name.split("/")[0] for name in files if "/" in name}
    steps = {step for step in steps if step.isdigit()}
    return {step for step in steps if f"{step}/{LAST}" not in files}


def _state(path):
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def need_local(name, path):
    """Raises a `ValueError` for an address where none can be used."""
    if is_address(path):
        raise ValueError(
            f"`{name}` must be a path of this machine. "
            f"Received: {name}={os.fspath(path)!r}"
        )


@contextlib.contextmanager
def written(path, on_first, read=()):
    """A scope with a folder of this machine, which is copied to an address.

    Of several processes, the first one writes and copies.

    Args:
        path: str or path; one that is no address is the folder itself.
        on_first: function that calls one without arguments in the first
            process, and raises in all processes what it raises.
        read: names of files that are looked at before they are replaced. Of
            others at the address there are empty files of their names.

    Raises:
        ValueError: the address cannot be written to.
    """
    if not is_address(path):
        yield path
        return
    address = os.fspath(path).rstrip("/")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = pathlib.Path(temporary, address.rsplit("/", 1)[-1])
        mirror = Mirror(address, folder)

        def begin():
            try:
                mirror.check()
            except Exception as error:
                raise not_writable(address, error) from error
            mirror.stand_in(*read)

        on_first(begin)
        try:
            yield folder
        except ValueError as error:
            text = str(error).replace(str(folder), address)
            raise ValueError(text) from error
        on_first(mirror.push)


def not_writable(address, error):
    """Returns the error for an address that cannot be written to."""
    return ValueError(
        f"The address {address!r} must be one that this machine can write to. "
        f"Received: {type(error).__name__}: {str(error)[:500]}"
    )


@contextlib.contextmanager
def read(path):
    """A scope with a path of this machine that has what is at an address.

    Raises:
        ValueError: there is nothing.
    """
    if not is_address(path):
        yield path
        return
    try:
        copy = local_copy(path)
    except OSError as error:
        raise ValueError(
            f"Nothing could be read from {os.fspath(path)!r}. "
            f"({type(error).__name__}: {str(error)[:500]})"
        ) from error
    try:
        yield copy
    except ValueError as error:
        text = str(error).replace(str(copy), os.fspath(path))
        raise ValueError(text) from error
