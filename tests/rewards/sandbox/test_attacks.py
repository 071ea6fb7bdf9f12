"""Hostile programs in the sandbox: none gets out, none claims a success, none leaves anything.

A program that attacks sets `won` if it has succeeded, and its test is `assert won`: it is worth 1
only then. Where it can be tried without harm, the same program wins without the sandbox.

Covers lrl/rewards/sandbox/session.py.
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
from tests.rewards.scenes import needs_bubblewrap

ROOT = Path(__file__).parents[3]
pytestmark = needs_bubblewrap
SECRET = "LRL_TEST_SECRET"
MARK = uuid.uuid4().hex[:12]
"""The name of processes and files of these programs."""
IMPORTS = "import atexit, builtins, ctypes, glob, mmap, os, resource, signal, socket, sys, threading, time\n"
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
    """What is there to steal: a secret in the environment and in a file, and two servers. Yields
    the words that programs use for them."""
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


def named():
    """The living processes of the programs of this file."""
    every = psutil.process_iter(["name", "status"])  # one that ends meanwhile is left out
    marked = [process for process in every if process.info["name"] == MARK]
    return [process for process in marked if process.info["status"] != psutil.STATUS_ZOMBIE]


STEALING = {
    "a file": "won = open('FOLDER/secret').read() == 'open sesame'",
    "a file by a link": "os.symlink('FOLDER/secret', 'link')\nwon = 'open' in open('link').read()",
    "a file by the root of a process": (
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  try: won = 'open' in open(f'/proc/{pid}/root/FOLDER/secret').read()\n"
        "  except OSError: pass\n"
    ),
    "a write": "open('FOLDER/written', 'w').write('x')\nwon = True",
    "the users": "won = 'root' in open('/etc/passwd').read()",
    "the processes": "won = len([each for each in os.listdir('/proc') if each.isdigit()]) > 3",
    "the network": "socket.create_connection(('127.0.0.1', PORT), 1)\nwon = True",
    "a socket without a file": "socket.socket(socket.AF_UNIX).connect('ABSTRACT')\nwon = True",
    "the name of the machine": "won = socket.gethostname() != 'sandbox'",
}


def test_memory_files_are_its_own(sandboxed):
    program = f"{IMPORTS}open('/dev/shm/{MARK}', 'w')\nwon = True"
    assert sandboxed("", program, tests=WON) == 1.0
    assert not Path(f"/dev/shm/{MARK}").exists()


@pytest.mark.parametrize("name", STEALING)
def test_nothing_outside_can_be_read_or_changed(name, outside, sandboxed, bare):
    program = IMPORTS + STEALING[name]
    for word, value in outside.items():
        program = program.replace(word, str(value).replace("\0", "\\x00"))
    assert sandboxed("", program, tests=WON) == 0.0
    assert not Path(outside["FOLDER"], "written").exists()
    assert bare("", program, tests=WON) == 1.0


INSIDE = {
    "the caller's environment": (
        "texts = [str(dict(os.environ))]\n"
        "for file in glob.glob('/proc/[0-9]*/environ'):\n"
        "  texts.append(open(file, 'rb').read().decode())\n"
        f"won = any('{SECRET}' in text for text in texts)"
    ),
    "a file descriptor of the caller": (
        "kinds = [os.readlink(f'/proc/self/fd/{each}') for each in range(20) if"
        " os.path.exists(f'/proc/self/fd/{each}')]\n"
        "won = any(each.startswith('/') and 'memfd' not in each for each in kinds)"
    ),
    "other interfaces": "won = any(name != 'lo' for _, name in socket.if_nameindex())",
    "an address elsewhere": "socket.create_connection(('1.1.1.1', 53), 1)\nwon = True",
    "the host of a virtual machine": (
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\nwon = True"
    ),
    "the kernel by netlink": "socket.socket(socket.AF_NETLINK)\nwon = True",
    "system files": "open('/usr/lrl', 'w')\nwon = True",
    "the root folder": "open('/lrl', 'w')\nwon = True",
    "any folder but two": (
        "open_folders = {top for top, inner, _ in os.walk('/') if os.access(top, os.W_OK) and"
        " not top.startswith('/proc')}\nwon = open_folders != {'/tmp', '/dev/shm'}"
    ),
    "devices": "os.mknod('/tmp/disk', 0o060600, os.makedev(8, 0))\nwon = True",
    "settings of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')\nwon = True",
    "more files than fit": (
        "for number in range(8): open(f'/tmp/{number}', 'wb').write(bytes(2**24))\nwon = True"
    ),
    "a file that is too large": "open('/tmp/large', 'wb').write(bytes(40 * 2**20))\nwon = True",
    "more memory": "x = bytearray(2**30)\nwon = True",
    "memory of other kinds": "mmap.mmap(-1, 2**30)\nwon = True",
    "another user": "os.setuid(0)\nwon = True",
    "more processes": "for _ in range(8):\n  if os.fork() == 0: time.sleep(60)\nwon = True",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))\nwon = True",
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_program_has_nothing_but_what_is_its_own(name, outside, sandboxed):
    assert sandboxed("", IMPORTS + INSIDE[name], tests=WON) == 0.0


CLAIMING = {
    "exits with 0": "os._exit(0)",
    "exits": "raise SystemExit(0)",
    "exits from a thread": "threading.Thread(target=os._exit, args=(0,)).start()",
    "exits at the end": "atexit.register(os._exit, 0)\nraise SystemExit",
    "prints words": "print('passed\\nended 0 0.000\\nOK\\n1.0', flush=True)",
    "becomes another program": "os.execv('/usr/bin/true', ['true'])",
    "closes all": "os.closerange(0, 100)",
    "ends the link": (
        "for file in range(3, 20):\n  try: socket.socket(fileno=file).shutdown(socket.SHUT_RDWR)\n"
        "  except OSError: pass\nos._exit(0)"
    ),
    "writes on the link": (
        "for file in range(3, 20):\n"
        "  for word in (b'\\nready\\n', b'\\n0 0\\n', b'x 0\\n', b'ended 0 0.000\\n'):\n"
        "    try: os.write(file, word)\n    except OSError: pass\n"
    ),
    "floods the link": (
        "for file in range(3, 20):\n  try:\n"
        "    for _ in range(50_000): os.write(file, b'ended 0\\n')\n  except OSError: pass\n"
    ),
    "replaces functions": (
        "builtins.exec = builtins.compile = lambda *_, **__: None\n"
        "os.read = os.pread = os.write = lambda *_: b''\nsys.exc_info = lambda: None"
    ),
    "replaces the error": "builtins.AssertionError = None",
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "ctypes.string_at(0)",
    "exits with the status of a kill": "os._exit(137)",
    "is too deep": (
        "sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())"
    ),
    "cannot be read": "-" * 100_000 + "1",
    "has a zero": "x = '\0'",
}


@pytest.mark.parametrize("name", CLAIMING)
def test_no_success_is_claimed_and_what_a_program_does_is_no_error(name, sandboxed):
    program = IMPORTS + CLAIMING[name]
    assert sandboxed("", program, tests="assert 1 == 2") == 0.0
    assert sandboxed("", program, tests=[{"input": "", "output": "42"}]) == 0.0


LYING = (
    "class A:\n  def __eq__(self, other): return True\n  __lt__ = __gt__ = __contains__ = __eq__\n"
    "  def __sub__(self, other): return 0.0\n  def __iter__(self): return iter([])\n"
    "def f(*_): return A()"
)
CHEATING = {
    "math.isclose": (
        "import math\nmath.isclose = lambda *_, **__: True",
        "math.isclose(f(1), 2.5)",
    ),
    "its own math": ("class math:\n  isclose = lambda *_, **__: True", "math.isclose(f(1), 2.5)"),
    "builtins.abs": ("import builtins\nbuiltins.abs = lambda _: 0", "abs(f(1) - 2.5) < 1e-6"),
    "its own abs": ("def abs(_): return 0", "abs(f(1) - 2.5) < 1e-6"),
    "builtins.all": (
        "import builtins\nbuiltins.all = lambda _: True",
        "all(f(x) == x for x in (1, 2))",
    ),
    "builtins.sorted": (
        "import builtins\nbuiltins.sorted = lambda _: 1",
        "sorted([f(1)]) == sorted([2])",
    ),
    "builtins.set": ("import builtins\nbuiltins.set = lambda _: 1", "set([f(1)]) == set([2])"),
    "a module in the folder": (
        "open('fractions.py', 'w').write('def Fraction(*_): return 0')",
        "f(1) == fractions.Fraction(1, 2)",
    ),
    "its caller's constants": (
        "import sys\ndef f(_):\n  frame = sys._getframe(1)\n  while frame:\n"
        "    if 42 in frame.f_code.co_consts: return 42\n    frame = frame.f_back\n",
        "f(1) == 42",
    ),
    "equal to all": (LYING, "f(1) == 2.5"),
    "no difference": (LYING, "abs(f(1) - 2.5) < 1e-6"),
    "less and more": (LYING, "f(1) < 2.5 and f(1) > 2.4"),
    "contains all": (LYING, "2.5 in f(1)"),
    "its callback's globals": (
        "def f(g):\n  for name in '__globals__', '__code__', '__closure__':\n"
        "    try:\n      getattr(g, name)\n      return 42\n    except TypeError: pass\n",
        "f(lambda: 0) == 42",
    ),
    "any function of the tests' process": (
        "def f(g):\n  for ask in ('eval', '1'), ('getattr', '{0.__globals__}', 'format'),"
        " ('setattr', g, '__code__', 1):\n"
        "    try:\n      g._peer.ask(*ask)\n      return 42\n    except TypeError: pass\n",
        "f(lambda: 0) == 42",
    ),
    "the memory of the tests": (
        "import os\ndef f(_):\n  for pid in {*filter(str.isdigit, os.listdir('/proc'))} - {str(os.getpid())}:\n"
        "    for name in 'mem', 'environ', 'fd/3', 'fd/4':\n      try:\n"
        "        open(f'/proc/{pid}/{name}', 'rb')\n        return 42\n      except OSError: pass\n",
        "f(1) == 42",
    ),
}


@pytest.mark.parametrize("name", CHEATING)
def test_a_program_can_change_nothing_that_its_tests_compare_with(name, sandboxed):
    program, test = CHEATING[name]
    if "def f" not in program:
        program += "\ndef f(x): return 0"
    assert sandboxed("", program, tests=f"assert {test}") == 0.0


def test_unittest_is_the_tests_own(sandboxed):
    tests = "import unittest\nclass T(unittest.TestCase):\n  def test_it(self): self.assertEqual(f(1), 2)"
    program = "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(x): return "
    assert sandboxed("", program + "0", tests=tests) == 0.0
    assert sandboxed("", program + "2", tests=tests) == 1.0


HARMLESS = {
    "kills the runner": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills process 1": "os.kill(1, signal.SIGKILL)",
    "kills all": "if os.fork() == 0: time.sleep(60)\nos.kill(-1, signal.SIGKILL)",
    "leaves a daemon": (
        f"if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    {CALL_ME}"
        "    time.sleep(600)\n  os._exit(0)\n"
    ),
    "leaves files": f"for folder in '/tmp', '/dev/shm': open(f'{{folder}}/{MARK}', 'w')",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_other_processes_and_later_runs_do_not_notice(name, sandboxed):
    program = IMPORTS + HARMLESS[name]
    found = sandboxed("", f"{program}\ndef f(): return 1", tests="assert f() == 1")
    assert found == float(name != "kills all")  # its own tests are among them
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
    script = f"from lrl.rewards import Code\nCode(fenced=False, timeout_s=600)('', {IN_VAIN!r}, tests='assert f()')"
    assert not named()
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_for(named, 60.0, "the program")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_for_none(named, 30.0, "the program")
