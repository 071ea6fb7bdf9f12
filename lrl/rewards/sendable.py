"""Whether a reward can be sent to a worker, which is told where to import it from. Seen when a run is configured."""

from __future__ import annotations

import pickle
import pickletools
import sys
from pathlib import Path

from lrl.rewards.base import Reward


def check_sendable(reward: Reward) -> None:
    """Refuses what no worker could load.

    Raises:
        ValueError: If it cannot be pickled, or is defined where only this process can see it.
    """
    try:
        pickled = pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"rewards has {reward.name!r}, which cannot be sent to a reward worker: {error}. Define it at the top "
            f"level of a module (no lambda, no function in a function), without open files or connections."
        ) from error
    if not _main_is_a_file() and any(text == "__main__" for _, text, _ in pickletools.genops(pickled)):
        raise ValueError(
            f"rewards has {reward.name!r}, which is defined in a notebook, on standard input or at the prompt: a "
            f"reward worker is a process of its own and cannot import it from there. Write it to a file, such as "
            f"my_rewards.py (in a notebook, begin its cell with `%%writefile my_rewards.py`), and give "
            f"`my_rewards:{reward.name}` instead."
        )


def _main_is_a_file() -> bool:
    """Whether a spawned process can import this one's `__main__`, as Python does by its name or its file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (file is not None and Path(file).is_file())
