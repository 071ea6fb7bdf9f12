"""A version staged by the trainer's ranks: each writes its part with a checksum of each block, none
gathers the whole, and rank 0 makes the header with all checksums.

With shared memory the ranks write into one file, which the generators load. With pull each keeps its
part in its own memory and serves it with its difference to the version before
(`lrl.weights.parts`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lrl.system.endpoint import Endpoint, Location, own_address_towards
from lrl.system.machine import memory_file
from lrl.system.ranks import Ranks
from lrl.weights.version_file import Header, Pieces, held_rows, require_memory, spec_of, sums_of

if TYPE_CHECKING:
    from lrl.training.pieces import Piece
    from lrl.weights.parts import Part, PartServer

CHUNK_BYTES = 2**26
"""Of a GPU's tensor that are copied at once; two chunks are in memory."""
Served = Location | int
"""Where a rank serves its parts; a port of rank 0's machine, whose address differs with the
generator."""


@dataclass(frozen=True)
class StageOrder:
    """Rank 0's order to stage a version."""

    pool: str
    """Of the generators; each has versions of its own."""
    narrow: torch.dtype | None
    """The generators' number format (`lrl.weights.version_file.spec_of`)."""
    file: str = ""
    """New and empty; without one each rank keeps its part in its memory."""


class Staging:
    """The parts that one rank has staged, for each pool of generators.

    Args:
        here: Whether it is on rank 0's machine.
    """

    def __init__(self, here: bool = True) -> None:
        self._here = here
        self.parts: dict[str, Part] = {}
        """What this rank serves, by pool."""
        self._headers: dict[str, Header] = {}
        """Of each pool's last version; the next one differs in its checksums."""
        self._server: PartServer | None = None

    def stage(self, pieces: Pieces, order: StageOrder, ranks: Ranks) -> Header:
        """Stages a version; all ranks call it, and another attempt changes nothing. Raises OSError
        on rank 0 if a rank has no room for its part."""
        before = self._headers.get(order.pool) or make_header(pieces, order, ranks)
        descriptor, sums, fault = _write_part(pieces(), before, order, ranks.rank)
        told = ranks.gather((sums, fault))
        fault = "; ".join(fault for _, fault in told if fault)
        header = ranks.share(
            before.with_sums([sums for sums, _ in told]) if told and not fault else None
        )
        self._headers[order.pool] = header or before
        if header is not None and not order.file:
            self._keep(order.pool, header, ranks.rank, descriptor)
            return header
        try:
            if header is not None and ranks.rank == 0:
                write_at(descriptor, header.text, 0)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if header is None and ranks.rank == 0:
            raise OSError(fault)
        return header or before

    def _keep(self, pool: str, header: Header, rank: int, descriptor: int) -> None:
        from lrl.weights.parts import Part  # here: not with a file

        older = self.parts.get(pool)
        if older is not None and older.header == header:  # another attempt
            os.close(descriptor)
        else:
            self.parts[pool] = Part(header, rank, descriptor, older)

    def serve(self, endpoint: Endpoint, token: str, ranks: Ranks) -> list[Served]:
        """Begins to serve the parts; all ranks call it. Returns where, by rank, on rank 0, which
        listens at `endpoint`."""
        if self._server is None:
            from lrl.weights.parts import PartServer

            if not self._here:
                rank_0 = os.environ["MASTER_ADDR"] if endpoint.is_everywhere else endpoint.host
                here = own_address_towards(endpoint.url(1, rank_0))
                # Not `replace`: rank 0's certificate, which is checked then, is not for this node.
                endpoint = copy(endpoint)
                endpoint.host = here
            self._server = PartServer(endpoint, token, self.parts)
        port = self._server.port
        return ranks.gather(port if self._here else self._server.location(endpoint.host))

    def close(self) -> None:
        """Frees all parts; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for part in self.parts.values():
            part.close()
        self.parts.clear()


def make_header(pieces: Pieces, order: StageOrder, ranks: Ranks) -> Header:
    """Returns the header without checksums; all ranks call it."""
    found = ranks.gather(held_rows(pieces(), order.narrow))
    header = ranks.share(Header.of(order.pool, found) if found else None)
    assert header is not None, "rank 0 has made it"
    return header


def _write_part(
    rows: Iterator[Piece], empty: Header, order: StageOrder, rank: int
) -> tuple[int, list[int], str]:
    """Writes a rank's part into a file or its memory, where the rest is a hole; returns that, open
    (-1 without one), the checksum of each block, and why the part was not written."""
    descriptor, sums, fault = -1, list[int](), ""
    blocks = empty.parts[rank]
    try:
        whole = order.file and rank == 0  # the others' parts of it are on this machine, too
        require_memory(empty.size if whole else sum(block.nbytes for block in blocks))
        descriptor = os.open(order.file, os.O_RDWR) if order.file else memory_file(order.pool)
        _write(rows, empty, order, descriptor)
        sums = sums_of(blocks, descriptor)
    except OSError as error:
        fault = f"rank {rank}: {error}"
    finally:
        deque(rows, maxlen=0)  # reading them may be a collective
    return descriptor, sums, fault


def _write(rows: Iterator[Piece], empty: Header, order: StageOrder, descriptor: int) -> None:
    left = set(empty.places)

    def placed() -> Iterator[tuple[int, Tensor]]:
        for piece in rows:
            left.remove(piece.name)
            spec = spec_of(piece, order.narrow)
            place = empty.places[piece.name] + piece.start * spec.row_bytes
            yield place, piece.rows.detach().to(spec.dtype)

    for place, content in host_bytes(placed()):
        write_at(descriptor, content, place)
    if left:
        raise RuntimeError(
            f"The policy has no {min(left)} any more, which it had at the first sync."
        )


def write_at(descriptor: int, content: memoryview | bytes, place: int) -> None:
    """Writes all bytes; one call of the kernel takes less than 2 GiB."""
    left = memoryview(content)
    while left:
        done = os.pwrite(descriptor, left, place)
        place += done
        left = left[done:]


def host_bytes(tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of tensors with their places: a tensor of the CPU at once, one of a GPU in
    chunks, of which the next is copied while the CPU uses the one before."""
    ahead: Callable[[], tuple[int, memoryview]] | None = None
    for place, tensor in tensors:
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        if content.device.type == "cpu":
            yield place, content.numpy().data
            continue
        for chunk in content.split(CHUNK_BYTES):
            before, ahead = ahead, _begin_copy(place, chunk)
            place += len(chunk)
            if before is not None:
                yield before()
    if ahead is not None:
        yield ahead()


def _begin_copy(place: int, source: Tensor) -> Callable[[], tuple[int, memoryview]]:
    """Begins to copy bytes from a GPU; returns what waits for them."""
    # Torch keeps pinned memory for the next copies.
    content = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
    content.copy_(source, non_blocking=True)
    arrived = torch.Event(source.device)
    arrived.record()

    def wait() -> tuple[int, memoryview]:
        arrived.synchronize()
        return place, content.numpy().data

    return wait
