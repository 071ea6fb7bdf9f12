"""The trainer's order to fetch a version, and the generator's report of it; both travel as JSON."""

from dataclasses import dataclass
from typing import Any, Literal

from lrl.system.endpoint import Location

FETCH = "/lrl/fetch"
"""The route of a generator that takes a `FetchOrder`."""
FILES = "/lrl/weights/"
"""The route under which the trainer and the generators serve a `RemoteFile` by its name."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that others fetch."""

    name: str
    """Unique in the run: no other content has it."""
    size: int
    """Bytes."""
    checksum: int
    """Of `lrl.weights.staged_file.checksum`."""


@dataclass(frozen=True)
class FetchOrder:
    """One version of the weights, and the way to it."""

    whole: RemoteFile
    sources: list[Location]
    """Where its files are, in the order in which to ask; the last one is the trainer."""
    deadline_s: float
    """Seconds for all of it."""
    delta: RemoteFile | None = None
    """What makes `whole` of `base` (`lrl.weights.delta`)."""
    base: str = ""
    """Name of the file that the delta needs."""

    @staticmethod
    def from_json(found: dict[str, Any]) -> "FetchOrder":
        """Returns the order that `asdict` has made a mapping of; raises TypeError or KeyError for
        anything else."""
        delta = RemoteFile(**found["delta"]) if found["delta"] else None
        sources = [Location(**source) for source in found["sources"]]
        return FetchOrder(
            **found | {"whole": RemoteFile(**found["whole"]), "delta": delta, "sources": sources}
        )


@dataclass(frozen=True)
class FetchReport:
    """The outcome of a fetch."""

    file: str
    """Path of the whole file on its machine."""
    how: Literal["held", "delta", "whole"]
    """`held`: it had the file already."""
    received: list[int]
    """Bytes from each of the order's sources."""
