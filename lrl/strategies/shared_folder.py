"""Checks that all ranks see the same checkpoint folder.

All else is rank 0's: the run's folder, its logs, and the model's files, which it sends.
"""

import secrets
import socket
import time
from pathlib import Path

from lrl.distributed.ranks import Ranks
from lrl.errors import ConfigError

SEEN_S = 5.0
"""Longest wait until a file that rank 0 has written is seen on another machine."""


def check_writes(ranks: Ranks, folders: list[Path]) -> None:
    """Checks that all ranks see the folders of rank 0 into which each writes its part of a
    checkpoint.

    Raises:
        ConfigError: On all ranks, if one does not see them.
    """
    marks = [folder.absolute() / f".lrl-{secrets.token_hex(4)}" for folder in folders]
    for mark in marks:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    unseen, end = ranks.share(marks), time.monotonic() + SEEN_S
    while (unseen := [mark for mark in unseen if not mark.exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    faults = [f"does not see {mark.parent}" for mark in unseen]
    try:
        _end_all(
            ranks,
            faults,
            "Put checkpoints on a file system that all nodes have (ModelCheckpoint.dirpath), or set "
            "strategy.save_distributed_checkpoint to false: rank 0 then writes one file.",
        )
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def check_reads(ranks: Ranks, checkpoint: str) -> None:
    """Checks that all ranks see the checkpoint from which rank 0 resumes; raises ConfigError on all
    ranks if not."""
    path = Path(checkpoint)
    size = path.stat().st_size if path.is_file() else path.exists()
    differs = size != ranks.share(size)
    _end_all(
        ranks,
        [f"does not see {checkpoint!r}, or another one there"] * differs,
        "The run resumes from it, and each rank reads it: put it on a file system that all nodes "
        "have, or copy it to the same path on each.",
    )


def _end_all(ranks: Ranks, faults: list[str], remedy: str) -> None:
    """Raises ConfigError on all ranks if one has a fault."""
    found = ranks.gather((socket.gethostname(), faults))
    named = [
        f"rank {rank} on {host} {fault}"
        for rank, (host, theirs) in enumerate(found)
        for fault in theirs
    ]
    if lost := ranks.share("; ".join(named[:3])):
        raise ConfigError(f"{lost}. {remedy}")
