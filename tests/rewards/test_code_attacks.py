"""Hostile programs in the sandbox: none gets out, none claims a success, none leaves anything.

A program that attacks sets `won` if it has succeeded, and its test is `assert won`: it is worth 1
only then. Where it can be tried without harm, the same program wins without the sandbox.

Covers lrl/rewards/code.py, sandbox.py, sandbox_session.py.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from lrl.rewards import Code
from tests.leftovers import wait_for, wait_for_none
from tests.rewards.bubblewrap_here import needs_bubblewrap

ROOT = Path(__file__).parents[2]
pytestmark = needs_bubblewrap
SECRET = "LRL_TEST_SECRET"
MARK = uuid.uuid4().hex[:12]
"""The name of processes and files of these programs."""
CALL_ME = f"import ctypes; ctypes.CDLL(None).prctl(15, b{MARK!r})\n"
WON = "assert won"


@pytest.fixture(scope="module")
def sandboxed():
    return Code(fenced=False, timeout_s=10.0, cpu_s=1, memory_mib=128)


@pytest.fixture(scope="module")
def bare():
    return Code(fenced=False, timeout_s=10.0, isolation="none")


@pytest.fixture
def outside(monkeypatch):
    """What is there to steal: a secret in the environment and in a file, and two servers. Yields the
    words that programs use for them."""
    monkeypatch.setenv(SECRET, "open sesame")
    folder = tempfile.mkdtemp(prefix="lrl")
    os.chmod(folder, 0o777)
    Path(folder, "secret").write_text("open sesame")
    abstract = f"\0{MARK}{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        yield {"FOLDER": folder, "PORT": tcp.getsockname()[1], "ABSTRACT": abstract}
    shutil.rmtree(folder)


def filled(program, words):
    for name, value in words.items():
        program = program.replace(name, str(value).replace("\0", "\\x00"))
    return program


def named():
    """The living processes of the programs of this file."""
    found = []
    for process in psutil.process_iter(["name", "status"]):  # one that ends meanwhile is left out
        if process.info["name"] == MARK and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


STEALING = {
    "a file": "won = open('FOLDER/secret').read() == 'open sesame'",
    "a file by a link": (
        "import os\nos.symlink('FOLDER/secret', 'link')\nwon = 'open' in open('link').read()"
    ),
    "a file by the root of a process": (
        "import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  try: won = 'open' in open(f'/proc/{pid}/root/FOLDER/secret').read()\n"
        "  except OSError: pass\n"
    ),
    "a write": "open('FOLDER/written', 'w').write('x')\nwon = True",
    "the users": "won = 'root' in open('/etc/passwd').read()",
    "the processes": (
        "import os\nwon = len([each for each in os.listdir('/proc') if each.isdigit()]) > 2"
    ),
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nwon = True",
    "a socket without a file": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('ABSTRACT')\nwon = True"
    ),
    "the name of the machine": "import socket\nwon = socket.gethostname() != 'sandbox'",
    "the host's memory files": f"open('/dev/shm/{MARK}', 'w')\nwon = HERE",
}


@pytest.mark.parametrize("name", STEALING)
def test_nothing_outside_can_be_read_or_changed(name, outside, sandboxed, bare):
    program = STEALING[name]
    shared = Path(f"/dev/shm/{MARK}")
    if "HERE" in program:
        assert sandboxed("", program.replace("HERE", "True"), tests=WON) == 1.0  # one of its own
        assert not shared.exists()
        return
    program = filled(program, outside)
    assert sandboxed("", program, tests=WON) == 0.0
    assert not Path(outside["FOLDER"], "written").exists()
    assert bare("", program, tests=WON) == 1.0


INSIDE = {
    "the caller's environment": (
        "import glob, os\ntexts = [str(dict(os.environ))]\n"
        "for file in glob.glob('/proc/[0-9]*/environ'):\n"
        "  texts.append(open(file, 'rb').read().decode())\n"
        f"won = any('{SECRET}' in text for text in texts)"
    ),
    "a file descriptor of the caller": (
        "import os\nkinds = [os.readlink(f'/proc/self/fd/{each}') for each in range(20)"
        " if os.path.exists(f'/proc/self/fd/{each}')]\n"
        "won = any(each.startswith('/') and 'memfd' not in each for each in kinds)"
    ),
    "other interfaces": (
        "import socket\nwon = any(name != 'lo' for _, name in socket.if_nameindex())"
    ),
    "an address elsewhere": (
        "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\nwon = True"
    ),
    "the host of a virtual machine": (
        "import socket\nsocket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\nwon = True"
    ),
    "the kernel by netlink": "import socket\nsocket.socket(socket.AF_NETLINK)\nwon = True",
    "system files": "open('/usr/lrl', 'w')\nwon = True",
    "the root folder": "open('/lrl', 'w')\nwon = True",
    "any folder but two": (
        "import os\nopen_folders = {top for top, inner, _ in os.walk('/')"
        " if os.access(top, os.W_OK) and not top.startswith('/proc')}\n"
        "won = open_folders != {'/tmp', '/dev/shm'}"
    ),
    "devices": "import os\nos.mknod('/tmp/disk', 0o060600, os.makedev(8, 0))\nwon = True",
    "settings of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')\nwon = True",
    "more files than fit": (
        "for number in range(8): open(f'/tmp/{number}', 'wb').write(bytes(2**24))\nwon = True"
    ),
    "a file that is too large": "open('/tmp/large', 'wb').write(bytes(40 * 2**20))\nwon = True",
    "more memory": "x = bytearray(2**30)\nwon = True",
    "memory of other kinds": "import mmap\nmmap.mmap(-1, 2**30)\nwon = True",
    "another user": "import os\nos.setuid(0)\nwon = True",
    "more processes": (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0: time.sleep(60)\nwon = True"
    ),
    "higher limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))\nwon = True"
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_program_has_nothing_but_what_is_its_own(name, outside, sandboxed):
    assert sandboxed("", INSIDE[name], tests=WON) == 0.0


CLAIMING = {
    "exits with 0": "import os\nos._exit(0)",
    "exits": "raise SystemExit(0)",
    "exits from a thread": (
        "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()"
    ),
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "prints words": "print('passed\\nended 0 0.000\\nOK\\n1.0', flush=True)",
    "becomes another program": "import os\nos.execv('/usr/bin/true', ['true'])",
    "closes all": "import os\nos.closerange(0, 100)",
    "ends the link": (
        "import os, socket\nfor file in range(3, 20):\n"
        "  try: socket.socket(fileno=file).shutdown(socket.SHUT_RDWR)\n  except OSError: pass\n"
        "os._exit(0)"
    ),
    "writes on the link": (
        "import os\nfor file in range(3, 20):\n  for word in (b'\\nready\\n', b'\\n0 0\\n', b'x 0\\n',"
        " b'ended 0 0.000\\n'):\n    try: os.write(file, word)\n    except OSError: pass\n"
    ),
    "floods the link": (
        "import os\nfor file in range(3, 20):\n  try:\n    for _ in range(50_000): os.write(file, b'ended 0\\n')\n"
        "  except OSError: pass\n"
    ),
    "replaces functions": (
        "import builtins, os, sys\nbuiltins.exec = builtins.compile = lambda *_, **__: None\n"
        "os.read = os.pread = os.write = lambda *_: b''\nsys.exc_info = lambda: None"
    ),
    "replaces the error": "import builtins\nbuiltins.AssertionError = None",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "exits with the status of a kill": "import os\nos._exit(137)",
    "is too deep": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n"
        "  def __repr__(self): return repr(self)\nrepr(A())"
    ),
    "cannot be read": "-" * 100_000 + "1",
    "has a zero": "x = '\0'",
}


@pytest.mark.parametrize("name", CLAIMING)
def test_no_success_is_claimed_and_what_a_program_does_is_no_error(name, sandboxed):
    program = CLAIMING[name]
    assert sandboxed("", program, tests="assert 1 == 2") == 0.0
    assert sandboxed("", program, tests=[{"input": "", "output": "42"}]) == 0.0


HARMLESS = {
    "kills the runner": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills process 1": "import os, signal\nos.kill(1, signal.SIGKILL)",
    "kills all": (
        "import os, signal, time\nif os.fork() == 0: time.sleep(60)\nos.kill(-1, signal.SIGKILL)"
    ),
    "leaves a daemon": (
        f"import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    {CALL_ME}"
        "    time.sleep(600)\n  os._exit(0)\n"
    ),
    "leaves files": f"for folder in '/tmp', '/dev/shm': open(f'{{folder}}/{MARK}', 'w')",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_other_processes_and_later_runs_do_not_notice(name, sandboxed):
    program = HARMLESS[name]
    assert sandboxed("", f"{program}\ndef f(): return 1", tests="assert f() == 1") == 1.0
    pairs = [{"input": "a", "output": "a"}, {"input": "b", "output": "b"}]
    assert sandboxed("", f"{program}\nprint(input())", tests=pairs) == 1.0
    assert not Path("/tmp", MARK).exists() and not Path("/dev/shm", MARK).exists()
    wait_for_none(named, 30.0, "a daemon")


def test_a_run_sees_no_process_of_the_one_before(sandboxed):
    program = (
        "import os, time\nprint(sum(each.isdigit() for each in os.listdir('/proc')), flush=True)\n"
        "if os.fork() == 0: time.sleep(60)"
    )
    pair = {"input": "", "output": "2"}
    assert sandboxed("", program, tests=[pair, pair, pair]) == 1.0


FORK_BOMB = (
    f"import os, time\n{CALL_ME}while True:\n  try: os.fork()\n  except OSError: time.sleep(600)"
)
IN_VAIN = (
    "import ctypes, signal, time\n"
    "ctypes.CDLL(None).prctl(1, 0)\n"  # it would outlive the process that started it
    "for number in range(1, 32):\n"
    "  try: signal.signal(number, signal.SIG_IGN)\n"
    "  except OSError: pass\n"
    f"{CALL_ME}time.sleep(600)"
)


@pytest.mark.parametrize("program", [FORK_BOMB, IN_VAIN], ids=["fork bomb", "waits"])
def test_nothing_is_left_of_a_program_that_does_not_end(program):
    judge = Code(fenced=False, timeout_s=3.0, cpu_s=1)
    assert judge("", program, tests=WON) == 0.0
    wait_for_none(named, 30.0, "the program")


def test_nothing_is_left_of_a_sandbox_whose_worker_is_killed():
    script = f"from lrl.rewards import Code\nCode(fenced=False, timeout_s=600)('', {IN_VAIN!r}, tests='1')"
    assert not named()
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_for(named, 60.0, "the program")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_for_none(named, 30.0, "the program")
