"""The program that runs a model's code, with limits and apart from the rest.

The interpreter runs this file as a script. It imports only the standard
library, so that it starts in a moment. There are three processes: this one;
its child, the first process of a namespace, whose end is that of all others
in it; and its child, a new interpreter, which runs the code.
"""

import contextlib
import ctypes
import glob
import json
import os
import resource
import signal
import sys

# Of Linux's headers.
NEWNS, NEWIPC, NEWUSER = 0x00020000, 0x08000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38

# A folder that all can read, which need not be a user's.
FOLDER = "/dev/shm"
# Root runs the code as a user that nobody else is.
FIRST_UID = 10**9
# Processes that are not the code's.
OWN_PROCESSES = 3


def libc(name, *arguments):
    """Calls a function of the C library; raises `OSError` if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is None or function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind=None, flags=0, data=None):
    texts = (x and x.encode() for x in (source, target, kind))
    libc("mount", *texts, ctypes.c_ulong(flags), data and data.encode())


def die_with_parent():
    with contextlib.suppress(OSError):
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(as_root):
    """Leaves the network, processes and mounts of the others, if it can.

    Root may not have the right to, but anybody may have it in a new namespace
    of users, with only this one.
    """
    uid, gid = os.getuid(), os.getgid()
    maps = {
        "setgroups": "deny",
        "uid_map": f"{uid} {uid} 1",
        "gid_map": f"{gid} {gid} 1",
    }
    flags = NEWNS | NEWPID | NEWNET | NEWIPC
    if as_root:
        with contextlib.suppress(OSError):
            libc("unshare", flags)
            return True
    with contextlib.suppress(OSError):
        libc("unshare", flags | NEWUSER)
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return True
    return False


def change_mounts(settings):
    """Hides the users' homes, and makes all but a new folder read-only.

    Parts of Python that are in a home stay visible. The new folder becomes
    the current one; every user can reach it, and Python keeps its locks there.
    """
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    size = f"size={settings['file_bytes']},nr_inodes=4096,mode=777"
    mount("tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(FOLDER)
    for home in settings["homes"]:
        hide(home, settings["keep"])
    set_attributes("/", ATTR_RDONLY, 0, AT_RECURSIVE)
    set_attributes(FOLDER, 0, ATTR_RDONLY, 0)
    with contextlib.suppress(OSError):
        # Containers may refuse it.
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        mount("proc", "/proc", "proc", flags)


def hide(home, keep):
    """Mounts an empty folder on a home, with the folders that are kept."""
    if home in keep:
        return
    kept = [
        (os.open(path, os.O_PATH), path)
        for path in sorted(set(keep))
        if path.startswith(home + "/")
    ]
    mount("tmpfs", home, "tmpfs", data="size=1m,mode=755")
    for descriptor, path in kept:
        os.makedirs(path, exist_ok=True)
        source = f"/proc/self/fd/{descriptor}"
        mount(source, path, flags=MS_BIND | MS_REC)
        os.close(descriptor)


def set_attributes(path, attributes, cleared, flags):
    """Sets and clears attributes of the mount at a path."""
    change = (ctypes.c_uint64 * 4)(attributes, cleared)
    libc(
        "syscall", ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, path.encode(),
        flags, ctypes.byref(change), ctypes.c_size_t(32),
    )  # fmt: skip


def drop_root(uid):
    """Becomes a user without rights, if this user could run Python."""
    os.chown(".", uid, uid)
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    can = os.access in os.supports_effective_ids and all(
        os.access(path, os.R_OK, effective_ids=True)
        for path in (os.__file__, sys.executable, os.path.abspath("main.py"))
    )
    os.seteuid(0)
    os.setegid(0)
    if can:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    return can


def end_children():
    """Kills and reaps all children, and orphans that become children."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for path in glob.glob("/proc/[0-9]*/stat"):
                with contextlib.suppress(OSError), open(path) as file:
                    pid, _, rest = file.read().rpartition(")")
                    if int(rest.split()[1]) == os.getpid():
                        os.kill(int(pid.split()[0]), signal.SIGKILL)
            os.wait()


def limit(settings, own_user):
    """Sets the limits of a process.

    Args:
        settings: dict, see `main`.
        own_user: bool, whether its user, or namespace of users, has no other
            processes, so that they can be counted.
    """
    processes = settings["processes"] + OWN_PROCESSES
    if not own_user:
        # The limit is on all threads of the user.
        for path in glob.glob("/proc/[0-9]*/task/[0-9]*"):
            with contextlib.suppress(OSError):
                processes += os.stat(path).st_uid == os.getuid()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, settings["cpu_seconds"]),
        (resource.RLIMIT_AS, settings["bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_NOFILE, settings["files"]),
        (resource.RLIMIT_NPROC, processes),
    ):
        # After the soft limit of CPU seconds comes a signal with a name.
        hard = value + (kind == resource.RLIMIT_CPU)
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            hard = min(hard, most)
        # macOS lacks some.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (min(value, hard), hard))
    with contextlib.suppress(OSError):
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def separate(settings, namespaces, uid):
    """Separates what runs the code from the rest.

    Args:
        settings: dict, see `main`.
        namespaces: bool, whether `unshare` has succeeded.
        uid: int, the user to become, or `None` unless root runs this.

    Returns:
        List of strings, what is separate.
    """
    names = ["network", "processes"] if namespaces else []
    with open("main.py", "rb") as file:
        code = file.read()
    if namespaces:
        with contextlib.suppress(OSError):
            change_mounts(settings)
            names.append("files")
    with open("main.py", "wb") as file:
        file.write(code)
    if uid:
        # It is not on all systems.
        with contextlib.suppress(OSError, AttributeError):
            if drop_root(uid):
                names.append("user")
    return names


def child(function, report):
    """Forks a process that reports an exception; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        function()
    except BaseException as error:
        report(error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def first_process(settings, namespaces, uid, report):
    """Starts the code, and reports how it ended; see `separate`."""
    names = separate(settings, namespaces, uid)
    # A change of the user has cleared it.
    die_with_parent()
    report(isolation=names, folder=os.getcwd())
    os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()

    def run():
        limit(settings, "user" in names or (namespaces and not uid))
        os.execv(sys.executable, [sys.executable, "-s", "-P", "main.py"])

    code, pid = child(run, report), None
    while pid != code:
        # Orphans of the code are this process's children.
        pid, status = os.wait()
    report(status=os.waitstatus_to_exitcode(status))
    os._exit(0)


def main(settings):
    """Runs `main.py` of the current folder, and reports in lines of JSON.

    The reports are `isolation`, the names of `separate`, and `folder`, the
    current one of the code, just before it starts; `status`, its exit status
    or minus the number of a signal; and `error`, a text, if it could not be
    started.

    Args:
        settings: dict of `report_to`, a file descriptor; `isolate`, whether
            to use namespaces; `homes` and `keep`, paths; and the limits.
    """
    os.set_inheritable(settings["report_to"], False)

    def report(**values):
        os.write(settings["report_to"], json.dumps(values).encode() + b"\n")

    die_with_parent()
    # Root becomes another user in each call, so that each has its own count.
    uid = FIRST_UID + os.getpid() if os.getuid() == 0 else None
    namespaces = settings["isolate"] and unshare(uid is not None)
    with contextlib.suppress(OSError):
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1)
    pid = child(
        lambda: first_process(settings, namespaces, uid, report), report
    )

    def end(*_):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    os.waitpid(pid, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_children()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
