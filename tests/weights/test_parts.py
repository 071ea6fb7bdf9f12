"""The difference of two versions of a block of weights."""

from __future__ import annotations

import os
import weakref

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from lrl.errors import BadTransfer
from lrl.weights.parts import Part, compressed, restore
from lrl.weights.version_file import Header, Held, TensorSpec
from tests.leftovers import wait_for

SIZE = 5000


def changed(old: bytes, places: list[int]) -> bytes:
    content = bytearray(old)
    for place in places:
        content[place] ^= 5
    return bytes(content)


@pytest.mark.parametrize(
    "words",
    [
        [],
        [0],
        [65_535, 65_536],
        [65_535, 131_072, 299_999],
        [200_000],
        list(range(0, 300_000, 7)),
        [*range(2000)],
    ],
)
def test_words_that_differ_are_found_again_in_every_row(words: list[int]) -> None:
    before = np.random.default_rng(0).integers(0, 2**16, 300_000, np.uint16)
    after = before.copy()
    after[words] ^= np.random.default_rng(1).integers(1, 2**16, len(words), np.uint16)
    small = compressed(before.view(np.uint8), after.view(np.uint8))
    restore(made := bytearray(before), small)
    assert made == after.tobytes()
    with pytest.raises(BadTransfer):
        restore(bytearray(before[:100_000]), small)


def part_of(content: bytes, older: Part | None = None) -> Part:
    """Returns the part of one rank with this content."""
    spec = TensorSpec("w", torch.uint8, (len(content),))
    header = Header.of("pool", [[Held(spec, 0, len(content))]])
    header = header.with_sums([[xxh3_64_intdigest(content)] * len(header.parts[0])])
    file = os.memfd_create("part")
    os.pwrite(file, content, len(header.text))
    return Part(header, 0, file, older)


def test_differences_lead_to_the_newer_part_and_free_the_older_one() -> None:
    old = os.urandom(9 * 2**12 + 1)  # an odd number of bytes
    new = changed(old, [7, 2**13, len(old) - 1])
    kept, older = part_of(old), part_of(old)
    part = part_of(new, older)
    assert part.base == older.header.checksum and older.base == ""
    for block in part.blocks:
        restore(made := bytearray(kept.read(block.index)), part.difference(block.index))
        assert made == part.read(block.index)
    wait_for(lambda: older._file.closed)
    part.close()
    with pytest.raises(IndexError):
        part.difference(0)


def test_a_run_of_many_versions_keeps_two_parts() -> None:
    part = part_of(b"0" * 2**12)
    first = weakref.ref(part)
    for _ in range(3):  # parts that kept all older ones ended at 450, by the limit of recursion
        older, part = part, part_of(b"1" * 2**12, part)
        wait_for(lambda older=older: older._file.closed)
    del older
    wait_for(lambda: first() is None)
    assert part.read(0) == b"1" * 2**12
    part.close()


def test_differences_that_are_no_smaller_are_not_made() -> None:
    older = part_of(os.urandom(9 * 2**12))
    assert part_of(os.urandom(9 * 2**12), older).base == ""
    wait_for(lambda: older._file.closed)
