"""The difference of two versions of one file of weights: which of its words of 16 bits differ, and
by which bits.

A small step leaves most bfloat16 weights as they are. Where few words differ, their places and
differences are far less to compress than the XOR of all words, which is mostly zeros. In float32
almost every weight changes, in its lower word.

A delta is a row of zlib streams, one for each `PIECE` of the files, each after its length: several
threads make them. Zlib's strategy for runs (Z_RLE) at level 1 is fast where little repeats.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from lrl.errors import DamagedDelta

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

PIECE = 2**24
"""Bytes of the files in one stream."""
ROW = 2**16
"""Words of a row: the place of a word in its row has 16 bits."""
LENGTH = struct.Struct(">Q")
MAX_DELTA_SHARE = 0.5
"""Largest share of the file that a delta is worth: above it, making it takes longer than a gigabit
link saves."""
PIECES_BEFORE_GIVING_UP = 2
"""Pieces after which a delta that is above `MAX_DELTA_SHARE` is given up."""


def write_delta(
    old: Path, new: Path, file: Path, interrupted: Callable[[], None] = lambda: None
) -> bool:
    """Writes the delta from `old` to `new`; returns False, with a part of it written, if that is
    not worth it.

    Args:
        old: The older file.
        new: The newer one.
        file: Where the delta is written; the caller removes it.
        interrupted: Called for each piece; raises to end the work.

    Raises:
        OSError: There is no room for it.
    """
    before, after = _view(old), _view(new)
    if len(before) != len(after):
        return False
    starts = range(0, len(after), PIECE)
    threads = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="lrl-delta")
    try:
        pieces = pool.map(
            lambda start: compressed(_piece(before, start), _piece(after, start)), starts
        )
        with file.open("wb") as out:
            for number, piece in enumerate(pieces, 1):
                interrupted()
                out.write(LENGTH.pack(len(piece)) + piece)
                if number < min(PIECES_BEFORE_GIVING_UP, len(starts)):
                    continue
                if out.tell() > MAX_DELTA_SHARE * min(len(after), number * PIECE):
                    return False
    finally:
        pool.shutdown(cancel_futures=True)
    return True


def apply_delta(old: Path, delta: Path, out: BinaryIO) -> int:
    """Writes the result of `delta` applied to `old` into `out`; returns its checksum
    (`staged_file.checksum`).

    Raises:
        DamagedDelta: It does not fit the file, or is no delta.
        OSError: There is no room for the file.
    """
    before = _view(old)
    value = xxh3_64()
    done = 0
    for small in _streams(delta):
        piece = _piece(before, done)
        if not len(piece):
            raise DamagedDelta(f"{delta} is longer than {old}.")
        try:
            made = restored(piece, small)
        except (zlib.error, ValueError, IndexError) as error:
            raise DamagedDelta(f"{delta} is damaged: {error}.") from error
        value.update(made.data)
        out.write(made.data)
        done += len(made)
    if done != len(before):
        raise DamagedDelta(f"{delta} ends after {done} of {len(before)} bytes.")
    return value.intdigest()


def compressed(before: Bytes, after: Bytes) -> bytes:
    """Returns the compressed difference of `before` and `after`, which have the same length.

    It is one zlib stream of the number of words that differ in each row, of the steps from each
    such place to the next, and of the XOR there; the lower and upper bytes of steps and XOR apart,
    because the upper ones are mostly zero.
    """
    old, new = _words(before), _words(after)
    places = np.flatnonzero(old != new)
    counts = np.diff(
        np.searchsorted(places, np.arange(0, len(old), ROW)), append=len(places)
    ).astype("<u4")
    steps = np.diff(places.astype("<u2"), prepend=np.uint16(0))  # within the row: modulo 2**16
    planes = [*_planes(steps), *_planes(old[places] ^ new[places])]
    stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return b"".join(
        [*(stream.compress(part.tobytes()) for part in (counts, *planes)), stream.flush()]
    )


def restored(before: Bytes, small: bytes) -> Bytes:
    """Returns the bytes whose difference from `before` is `small`, the result of `compressed`.

    Raises:
        zlib.error, ValueError, IndexError: It was not made for this length, or is damaged.
    """
    old = _words(before)
    data = np.frombuffer(zlib.decompress(small), np.uint8)
    rows = np.arange(0, len(old), ROW)
    counts = data[: 4 * len(rows)].view("<u4")
    planes = data[4 * len(rows) :].reshape(4, -1)
    if counts.sum() != planes.shape[1]:
        raise ValueError(f"it names {planes.shape[1]} words, and counts {counts.sum()}")
    steps, differences = (low | high.astype("<u2") << 8 for low, high in (planes[:2], planes[2:]))
    made = old.copy()
    made[np.repeat(rows, counts) + np.cumsum(steps, dtype="<u2")] ^= differences
    return made.view(np.uint8)[: len(before)]


def _planes(words: Words) -> Bytes:
    """Returns the lower and the upper bytes."""
    return words.view(np.uint8).reshape(-1, 2).T


def _words(piece: Bytes) -> Words:
    return (piece if len(piece) % 2 == 0 else np.append(piece, np.uint8(0))).view("<u2")


def _piece(file: Bytes, start: int) -> Bytes:
    return file[start : start + PIECE]


def _streams(delta: Path) -> Iterator[bytes]:
    data, place = _view(delta).data, 0
    try:
        while place < len(data):
            (length,) = LENGTH.unpack(data[place : place + LENGTH.size])
            place += LENGTH.size + length
            yield bytes(data[place - length : place])
    except struct.error as error:
        raise DamagedDelta(f"{delta} is damaged: {error}.") from error


def _view(path: Path) -> Bytes:
    """Maps a file; pages that nobody reads cost no memory."""
    return np.asarray(np.memmap(path, np.uint8, "r"))
