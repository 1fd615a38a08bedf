"""The code tool: whatever the code does is an answer, in bounded time."""

import asyncio
import ctypes
import inspect
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from keras_posttrain.episodes import python_tool
from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.python_child import PR_SET_CHILD_SUBREAPER
from keras_posttrain.episodes.python_tool import Python, python
from keras_posttrain.episodes.run_tool import call
from keras_posttrain.episodes.schema import json_schema

# The second as where the kernel allows no namespaces.
TOOLS = {
    "isolated": Python(seconds=30),
    "plain": Python(seconds=30, isolate=False),
}


@pytest.fixture(params=TOOLS)
def tool(request):
    return TOOLS[request.param]


def hurried(tool):
    """A tool with little time: Python itself starts in it."""
    return Python(seconds=2, isolate=tool.isolate)


def separate(what):
    if what not in TOOLS["isolated"].isolation:
        pytest.skip(f"This kernel keeps code from no {what}.")
    return TOOLS["isolated"]


def running(word):
    """The ids of processes whose command line has a word."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def gone(word):
    end = time.monotonic() + 20
    while running(word) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(word)


@pytest.mark.parametrize(
    "code, text",
    [
        ("print(6 * 7)", "42"),
        ("", "(no output)"),
        ("print('ü 漢')", "ü 漢"),
        ("print('\ud800')", "?"),
        ("import sys; sys.stdout.buffer.write(b'\\xff ok')", "� ok"),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\nb"),
        ("import os; print(os.getcwd(), os.listdir())", ". ['main.py']"),
        # Neither input nor modules of the folder of the program.
        ("import sys; print(repr(sys.stdin.read()))", "''"),
        ("import sys; print(sys.argv, __name__)", "['main.py'] __main__"),
        ("print(hash('text') == hash('text'), {'b', 'a'})", None),
        ("import sys; sys.exit(2**40)", "(no output)"),
        ("import sys; sys.exit(10**100)", "error: exit status 255"),
        ("import os; os._exit(77)", "error: exit status 77"),
        ("exit('bye')", "bye\nerror: exit status 1"),
        ("import os; os.kill(os.getpid(), 9)", "error: ended by SIGKILL"),
        ("import os; os.abort()", "error: ended by SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "error: ended by signal 40"),
    ],
)
def test_what_code_prints_and_how_it_ends(tool, code, text):
    found = tool(code)
    assert found == (tool(code) if text is None else text)


def test_an_exception_is_shown_with_its_line(tool):
    found = tool("def f(x):\n    return 1 / x\n\n\nf(0)\n")
    assert found.startswith('Traceback (most recent call last):\n  File "./m')
    assert '"./main.py", line 5, in <module>' in found
    assert "return 1 / x" in found
    assert found.endswith("ZeroDivisionError: division by zero\nerror: exit "
                          "status 1")  # fmt: skip
    assert "SyntaxError" in tool("def")
    assert "RecursionError" in tool("def f(): f()\nf()")


HANGS = {
    "sleeps": "import time; time.sleep(600)",
    "computes": "9**9**9**9",
    "ignores SIGTERM": """
        import signal, time
        for n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(n, signal.SIG_IGN)
        time.sleep(600)
        """,
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "closes its output": "import os, time; os.closerange(0, 99); "
    "time.sleep(600)",
}


@pytest.mark.parametrize("name", HANGS)
def test_code_that_hangs(tool, name):
    start = time.monotonic()
    code = "print('here')\n" + textwrap.dedent(HANGS[name])
    found = hurried(tool)(code)
    # A process may use no more processor time than that either.
    assert found in (
        "here\nerror: took longer than 2 s",
        "here\nerror: used more than 2 s of processor time",
    )
    assert time.monotonic() - start < 10


def test_a_process_that_is_left_behind(tool):
    """In the background, and in a session of its own; it holds the output."""
    word = f"{os.getpid()}.25"
    found = tool(
        "import subprocess\n"
        f"subprocess.Popen(['sleep', '{word}'])\n"
        f"subprocess.Popen(['sleep', '{word}'], start_new_session=True)\n"
        f"subprocess.run('setsid sleep {word} &', shell=True)\n"
        "print('left')"
    )
    assert found == "left"
    assert gone(word)


def test_processes_and_threads_are_counted(tool):
    """All are killed at the end, those that fork on and on too."""
    code = """
        import os, time
        count = 0
        try:
            while True:
                if not os.fork():
                    time.sleep(600)
                count += 1
        except OSError:
            print(count)
        """
    if tool.isolate and tool.isolation or os.getuid():
        assert 25 <= int(tool(textwrap.dedent(code))) <= 40
    code = """
        import threading, time
        count = 0
        try:
            while count < 1000:
                thread = threading.Thread(target=time.sleep, args=[600])
                thread.daemon = True
                thread.start()
                count += 1
        except RuntimeError:
            print(count)
        """
    assert 25 <= int(tool(textwrap.dedent(code))) < 100


def test_a_fork_bomb():
    if not TOOLS["isolated"].isolation and not os.getuid():
        pytest.skip("Nothing bounds the processes of root.")
    word = f"bomb{os.getpid()}"
    start = time.monotonic()
    found = hurried(TOOLS["isolated"])(f"""
import os, sys
while True:
    try:
        if not os.fork():
            os.execv(sys.executable, [sys.executable, "main.py", "{word}"])
    except OSError:
        pass
""")
    assert found.endswith("error: took longer than 2 s")
    assert time.monotonic() - start < 15
    assert gone(word)


def test_a_gigabyte_of_output(tool):
    """Neither kept in memory nor waited for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = "while True: print('x' * 2**20)"
    start = time.monotonic()
    found = tool(code)
    assert found.endswith("error: printed more than 1048576 bytes")
    assert len(found) < 2**20 + 100
    assert time.monotonic() - start < 15
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # KiB
    # A subprocess that ignores the limits of Python.
    found = tool("import subprocess; subprocess.run('yes', shell=True)")
    assert found.endswith("error: printed more than 1048576 bytes")


def test_memory_files_and_processor_time(tool):
    assert "MemoryError" in tool("x = bytearray(2**30)")
    found = tool("open('big', 'wb').write(b'x' * 2**27)")
    assert "File too large" in found or "No space left" in found
    small = Python(seconds=0.5, isolate=tool.isolate)
    start = time.monotonic()
    assert "0.5 s" in small("import time; time.sleep(60)")
    assert time.monotonic() - start < 10


def test_no_folder_is_left(tool, tmp_path, monkeypatch):
    """In a folder that only this user may read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = tool(
        "import os\n"
        "os.makedirs('a/b/c')\n"
        "open('a/b/c/d', 'w').write('x')\n"
        "os.chmod('a/b', 0)\n"
        "print(os.environ['HOME'], os.environ['TMPDIR'], os.getcwd())"
    )
    assert found == ". . ."
    assert not os.listdir(tmp_path)


def test_the_environment_is_not_the_trainer_s(tool, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = tool("import os; print(dict(os.environ))")
    assert "HOME" in found and "hunter2" not in found
    assert "KERAS_BACKEND" not in found


def test_packages_can_be_imported(tool):
    assert tool("import numpy; print(numpy.arange(3))") == "[0 1 2]"


def test_calls_do_not_see_each_other(tool):
    assert tool("x = 1; open('y', 'w').write('z')") == "(no output)"
    assert "NameError" in tool("print(x)")
    assert tool("import os; print(os.listdir())") == "['main.py']"


# What namespaces give


def test_no_network():
    code = """
        import socket
        try:
            socket.create_connection(("127.0.0.1", {port}), timeout=5)
            print("connected")
        except OSError as error:
            print(error)
        """
    with open_port() as listener:
        code = textwrap.dedent(code).format(port=listener.getsockname()[1])
        # The port is there.
        assert TOOLS["plain"](code) == "connected"
        assert "unreachable" in separate("network")(code)


def open_port():
    # Only this test needs it.
    import socket

    return socket.create_server(("127.0.0.1", 0))


def test_other_processes_are_not_seen():
    """Their environment, their memory, their being there at all."""
    other = subprocess.Popen(
        ["sleep", "60"], env={"SECRET_TOKEN": "hunter2", **os.environ}
    )
    try:
        found = separate("processes")(f"""
import glob, os, signal
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if b"hunter2" in open(path, "rb").read():
            print("read", path)
    except OSError:
        pass
try:
    os.kill({other.pid}, signal.SIGKILL)
    print("killed")
except OSError as error:
    print(type(error).__name__)
""")
        assert found == "ProcessLookupError"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_files_of_others_are_not_written_and_those_at_home_not_read(
    tmp_path, monkeypatch
):
    tool = separate("files")
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("hunter2")
    (tmp_path / "kept").write_text("kept")
    # Those of pytest; with several workers there is one more.
    for path in tmp_path.parents:
        if not path.name.startswith(("pytest-", "popen-")):
            break
        path.chmod(0o777)
    for path in (tmp_path, home):
        path.chmod(0o777)
    monkeypatch.setenv("HOME", str(home))
    found = tool(f"""
import os, shutil
root = {str(tmp_path)!r}
print(os.listdir(root), os.listdir(root + "/home"))
shutil.rmtree(root, ignore_errors=True)
for path in (root + "/new", root + "/home/new", "/tmp/new", "/new"):
    try:
        open(path, "w")
        print("written", path)
    except OSError:
        pass
""")
    assert sorted(eval(found.replace("] [", "] + ["))) == ["home", "kept"]
    assert (home / "token").read_text() == "hunter2"
    assert (tmp_path / "kept").read_text() == "kept"


def test_nobody_is_harmed_by_a_killed_trainer(tool):
    """The code ends with the process that called the tool."""
    word = f"orphan{os.getpid()}"
    program = f"""
from keras_posttrain.episodes.python_tool import Python
Python(seconds=600, isolate={tool.isolate})('''
import os, sys, time
if sys.argv[-1] != "{word}":
    os.execv(sys.executable, [sys.executable, "main.py", "{word}"])
time.sleep(600)
''')
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        end = time.monotonic() + 60
        # The program has the word too, and for a moment what it forks.
        code = f"main.py\0{word}"
        while not running(code) and time.monotonic() < end:
            time.sleep(0.05)
        assert running(code)
    finally:
        process.kill()
        process.wait()
    assert gone(word)


# As a tool


def test_it_is_a_tool_by_name_signature_and_docstring():
    assert python.__name__ == "python"
    assert inspect.getdoc(python).startswith("Runs Python code and returns")
    parameters = inspect.signature(python).parameters
    assert [*parameters] == ["code"]
    assert parameters["code"].annotation is str
    assert python == Python() and "seconds=5.0" in repr(python)


def test_many_calls_at_once():
    async def main():
        return await asyncio.gather(
            *(
                call(python, {"code": f"print({i} ** 2)"}, seconds=0.01)
                for i in range(24)
            )
        )

    threads = threading.active_count()
    texts = [result.text for result in asyncio.run(main())]
    assert texts == [str(i**2) for i in range(24)]
    wrong = asyncio.run(call(python, {"code": 3}, seconds=60))
    assert wrong.kind == "arguments"
    deadline = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(python_tool, "SCRIPT", pathlib.Path("/not/there.py"))
    with pytest.raises(EpisodeError, match="No process for code: the proc"):
        python("1")
    monkeypatch.setattr(sys, "executable", "/not/there")
    with pytest.raises(EpisodeError, match="No such file"):
        python("1")


@pytest.mark.parametrize(
    "setting", [{"seconds": 0}, {"max_bytes": 0}, {"max_processes": 1.5}]
)
def test_settings_that_make_no_sense(setting):
    [(name, value)] = setting.items()
    with pytest.raises(ValueError, match=f"`{name}`.*{name}={value}"):
        Python(**setting)


def test_a_model_is_told_of_its_argument():
    told = json_schema(python)["function"]
    assert told["name"] == "python"
    assert told["parameters"]["properties"]["code"]["type"] == "string"


def children():
    """The ids of this process's children, ended ones too."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == os.getpid():
            found.add(int(pid.split()[0]))
    return found


def test_no_ended_process_is_left(tool):
    """Nor to the first process of a container, which may be the trainer."""
    libc = ctypes.CDLL(None)
    before = children()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        for code in ("", "import os; os.fork()", "import time; time.sleep(9)"):
            hurried(tool)(code)
        assert children() == before
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
