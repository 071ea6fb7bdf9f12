"""Whether a reward can be sent to a worker, which is told where to import it from. Seen when a run is configured."""

from __future__ import annotations

import pickle
import pickletools
import sys
from pathlib import Path

from lrl.rewards.base import Reward
from lrl.runtime.config_errors import ConfigError


def check_sendable(reward: Reward) -> None:
    """Refuses what no worker could load.

    Raises:
        ValueError: If it cannot be pickled, or is defined where only this process can see it.
    """
    try:
        pickled = pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"rewards has {reward.name!r}, which cannot be sent to a reward worker: {error}. Define it at the top "
            f"level of a module (no lambda, no function in a function), without open files or connections."
        ) from error
    if _main_is_nowhere() and any(text == "__main__" for _, text, _ in pickletools.genops(pickled)):
        raise ConfigError(
            f"rewards has {reward.name!r}, which is defined in a notebook or at a prompt: a reward worker is a process "
            f"of its own and cannot import it from there. Write it to a file (in a notebook, begin its cell with "
            f"`%%writefile my_rewards.py`) and import it from there, or name a function `my_rewards:{reward.name}`."
        )


def check_main() -> None:
    """Refuses a script whose file no worker will find; each imports the script that is run, as spawned processes do.

    Raises:
        ValueError: If the script came by standard input.
    """
    file = _file_of_main()
    if file is not None and not Path(file).is_file() and getattr(sys.modules["__main__"], "__spec__", None) is None:
        raise ConfigError(
            f"This script is {file}, which is no file. Reward workers are processes of their own and import "
            "the script that is run: write it to a file, such as train.py, and run that."
        )


def _main_is_nowhere() -> bool:
    """Whether spawned processes do without this one's `__main__`, as it has neither a name (`python -m`) nor a file."""
    return getattr(sys.modules["__main__"], "__spec__", None) is None and _file_of_main() is None


def _file_of_main() -> str | None:
    return getattr(sys.modules["__main__"], "__file__", None)
