"""A user's code, rewards or an environment, in a process of its own, which may hang, crash or leak:
its limits, and the words in which it fails. Nothing here imports torch."""

import os
import pickle
import pickletools
import resource
import signal
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from lrl.errors import ConfigError
from lrl.system.endpoint import LOOPBACK

OUT_OF_MEMORY = 112
"""Exit code of a process at its memory limit."""
LONGEST_MESSAGE = 500
START_TIMEOUT_S = 120.0
"""Most seconds for the start of such a process, by default."""
_NOT_THE_USERS = (
    *(str(Path(__file__).parents[1]) + os.sep, "<frozen "),
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Where the files of lrl and of libraries are."""
GUARD = 'What starts the training must stand under `if __name__ == "__main__":`.'


def ask_this_machine_itself() -> None:
    """Has HTTP clients, here and in child processes, reach loopback without the proxy that the
    environment names: an agent finds its policy there."""
    named = {name: os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")}
    for name, hosts in named.items():
        hosts = hosts or "".join(named.values())
        if hosts != "*":
            hosts = f"{hosts},{LOOPBACK}".lstrip(",")
        os.environ[name] = hosts


def limit_memory(gib: float | None) -> None:
    """Limits writable private memory (RLIMIT_DATA), counted from the memory in use now.

    RLIMIT_AS would also count memory that is only reserved: CUDA, a Java machine or one malloc
    arena for each thread reserve many GiB and use none of it.
    """
    if gib is None:
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def message_of(error: BaseException) -> str:
    """Returns type and message of an exception, whose `__str__` may raise."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {message}"[:LONGEST_MESSAGE]


def where_raised(error: BaseException) -> str:
    """Returns the last line of the user's code in the traceback, in brackets; empty if there is
    none."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""


def cause_of_death(exit_code: int | None) -> str:
    """Returns how a process ended that nobody has ended; an unknown exit code is None."""
    if exit_code is None:
        return "the worker ended"
    if exit_code == -signal.SIGKILL:
        return "the worker was ended by SIGKILL, as Linux does when the machine is out of memory"
    if exit_code < 0:
        return f"the worker was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"the worker ended with exit code {exit_code}"


def pickled(thing: Any, what: str) -> bytes:
    """Returns `thing` for a worker, which imports the user's modules anew.

    Args:
        thing: An object of a user's class.
        what: Setting and object, as an error begins.

    Raises:
        ConfigError: It cannot be sent.
    """
    try:
        return pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "__mp_main__" in str(error):  # the script's name in a worker, which only imports it
            raise ConfigError(
                f"A worker imports this script, and it begins to train. {GUARD}"
            ) from None
        raise ConfigError(
            f"{what}, which cannot be sent to a worker: {error}. Define it at the top level of a "
            "module (no lambda, no function in a function), without open files or connections."
        ) from error


def names_main(pickled: bytes) -> bool:
    """Whether something in it is defined in the script that runs."""
    return any(text == "__main__" for _, text, _ in pickletools.genops(pickled))
