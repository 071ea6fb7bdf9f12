"""Checks that all ranks see the same checkpoint folder.

All else is rank 0's: the run's folder, its logs, and the model's files, which it sends.
"""

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    with marked(folders if ranks.rank == 0 else []) as marks:
        lost = unseen(ranks, ranks.share(marks))
    if lost:
        raise ConfigError(
            "strategy.save_distributed_checkpoint is true, so each rank writes its part of a "
            f"checkpoint, and {lost}. Put it on a file system that all nodes have "
            "(trainer.default_root_dir, the logger's save_dir, or ModelCheckpoint.dirpath), or set "
            "strategy.save_distributed_checkpoint to false: rank 0 then writes one file."
        )


def check_reads(ranks: Ranks, checkpoint: str) -> None:
    """Checks that all ranks see the checkpoint from which rank 0 resumes; raises ConfigError on all
    ranks if not."""
    of_rank_0 = ranks.share(described(Path(checkpoint)))
    seen_here = described(Path(checkpoint))
    seen = ranks.gather(
        f"{checkpoint} on {socket.gethostname()} {seen_here or 'is not there'}"
        if seen_here != of_rank_0
        else None
    )
    if lost := ranks.share(
        [f"rank {rank}: {difference}" for rank, difference in enumerate(seen) if difference]
    ):
        raise ConfigError(
            f"The run resumes from {checkpoint!r}, which each rank reads, and not all see the one "
            f"of rank 0 {of_rank_0} ({'; '.join(lost[:3])}). Put it on a file system that all nodes "
            "have, or copy it to the same path on each."
        )


def described(path: Path) -> str | None:
    """Returns the name and the size in bytes of a checkpoint, which identify it; None if it is
    missing."""
    if path.is_dir():
        return f"({path.name}, a folder)"
    return f"({path.name}, {path.stat().st_size} bytes)" if path.exists() else None


@contextmanager
def marked(folders: list[Path]) -> Iterator[list[Path]]:
    """Yields a new file in each folder; removes them."""
    marks = [folder.absolute() / f".lrl-{secrets.token_hex(4)}" for folder in folders]
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        yield marks
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def unseen(ranks: Ranks, marks: list[Path]) -> str:
    """Returns, on all ranks, the ranks that do not see rank 0's files within `SEEN_S`; empty if all
    do."""
    end, missing = time.monotonic() + SEEN_S, list(marks)
    while (missing := [mark for mark in missing if not mark.exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    found = ranks.gather([socket.gethostname(), *(str(mark.parent) for mark in missing)])
    lost = [
        f"rank {rank} on {host} does not see {folders[0]}"
        for rank, (host, *folders) in enumerate(found)
        if folders
    ]
    return ranks.share("; ".join(lost[:3]))
