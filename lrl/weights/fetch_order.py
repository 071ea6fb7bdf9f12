"""The trainer's order to fetch a version, and the generator's report of it; both travel as JSON."""

from dataclasses import dataclass
from typing import Any, Literal

from lrl.system.endpoint import Location

FETCH = "/lrl/fetch"
"""The route of a generator that takes a `FetchOrder`."""
PARTS = "/lrl/parts/"
"""The route under which the trainer's ranks and the generators serve the blocks of a version
(`lrl.weights.part_server`)."""


@dataclass(frozen=True)
class FetchOrder:
    """One version of the weights, and the ways to it."""

    version: str
    """Unique in the run: no other content has the name."""
    checksum: int
    """Of its header."""
    ranks: list[Location]
    """The trainer's ranks, each with its part."""
    peers: list[Location]
    """All machines that fetch the version now, this one too; none for one that fetches alone."""
    number: int
    """Of this one among them."""
    deadline_s: float
    """Seconds for all of it."""
    beside: str = ""
    """Path of the version's file of another generator on this machine."""

    @staticmethod
    def from_json(found: dict[str, Any]) -> "FetchOrder":
        """Returns the order that `asdict` has made a mapping of; raises TypeError or KeyError for
        anything else."""
        places = {name: [Location(**place) for place in found[name]] for name in ("ranks", "peers")}
        return FetchOrder(**found | places)


@dataclass(frozen=True)
class FetchReport:
    """The outcome of a fetch."""

    file: str
    """Path of the version's file on its machine."""
    how: Literal["held", "delta", "whole"]
    """`held`: it was there already."""
    from_trainer: int = 0
    """Bytes."""
    from_peers: int = 0
    """Bytes."""
