"""A generator that fetches its weights, from ranks and other generators that break, stall, lie and
die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lrl.errors import FetchFailed
from lrl.system.endpoint import Endpoint, Location, first_certificate
from lrl.vllm_plugin import fetched_files
from lrl.vllm_plugin.fetched_files import FetchedFiles
from lrl.weights.parts import PARTS, FetchOrder, Part
from lrl.weights.staging import StageOrder
from lrl.weights.version_file import path_of
from tests.certificates import self_signed, signed_by
from tests.http_call import call
from tests.weights.scripted_source import Fault, ScriptedSource
from tests.weights.whole_weights import SmallPolicy

TOKEN = "secret"
DEADLINE_S = 300.0
NOBODY = Location("http://127.0.0.1:9")
"""A machine that has died: nothing listens at the port."""


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FetchedFiles:
    monkeypatch.setattr(fetched_files, "BACKOFF_S", 0.001)
    return FetchedFiles(TOKEN)


def held(files: FetchedFiles) -> list[str]:
    """Checksums of the versions in memory, whole or not."""
    return [file.header.checksum for file in (files._whole, files._draft) if file is not None]


class Trainer(SmallPolicy):
    """One whose ranks stage and serve their parts."""

    def __init__(self, ranks: int = 1, endpoint: Endpoint = Endpoint()) -> None:  # noqa: B008 - frozen
        super().__init__(ranks)
        self.locations = list(map(endpoint.location, self.serve_weights(endpoint, TOKEN)))

    def stage(self) -> FetchOrder:
        """Stages the weights as they are, and returns the order to fetch them."""
        header = self.stage_weights(StageOrder("pool", torch.bfloat16))
        return FetchOrder(header.checksum, self.locations, [], 0, DEADLINE_S)

    @property
    def parts(self) -> list[Part]:
        return [one.staging.parts["pool"] for one in self.all]

    def has_sent(self, file: str) -> bool:
        return self.is_in(load_file(file))


@pytest.fixture(params=[1, 3])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with closing(Trainer(request.param)) as made:
        yield made


@pytest.fixture
def one_rank() -> Iterator[Trainer]:
    with closing(Trainer()) as made:
        yield made


def source(trainer: Trainer, *faults: Fault) -> AbstractContextManager[ScriptedSource]:
    """Serves what all ranks have staged."""
    return closing(ScriptedSource(trainer.parts, TOKEN, faults))


def test_who_holds_the_version_before_fetches_differences_and_others_the_whole_and_keep_no_other(
    trainer: Trainer, files: FetchedFiles
) -> None:
    first = files.fetch(trainer.stage())
    assert first.how == "whole" and first.from_trainer == 300 * 256 * 2 + 65 * 4 + 3 * 8
    assert trainer.has_sent(first.file)
    trainer.step()
    asked = trainer.stage()
    second = files.fetch(asked)
    assert second.how == "delta" and second.from_trainer < first.from_trainer / 10
    assert trainer.has_sent(second.file) and held(files) == [asked.checksum]
    for _ in range(2):
        trainer.step()
        fourth = trainer.stage()
    assert files.fetch(fourth).how == "whole", "it missed a version"
    assert held(files) == [fourth.checksum]


def test_what_is_held_or_beside_is_not_fetched_again(
    tmp_path: Path, trainer: Trainer, files: FetchedFiles
) -> None:
    asked = trainer.stage()
    path = files.fetch(asked).file
    trainer.close()
    again = files.fetch(asked)
    assert (again.how, again.from_trainer, again.file) == ("held", 0, path)
    other = FetchedFiles(TOKEN)
    assert other.fetch(replace(asked, beside=path)).file == path
    no_file = os.open(tmp_path, os.O_RDONLY)  # the number of a descriptor is used again
    for another in (f"{path}0", path_of(no_file)):
        with pytest.raises(FetchFailed):
            other.fetch(replace(asked, beside=another))
    os.close(no_file)


def test_a_base_that_was_damaged_is_noticed_and_the_whole_is_fetched(
    trainer: Trainer, files: FetchedFiles
) -> None:
    base = Path(files.fetch(trainer.stage()).file)
    content = bytearray(base.read_bytes())
    content[-1000] ^= 1
    base.write_bytes(content)
    trainer.step()
    assert trainer.has_sent(files.fetch(trainer.stage()).file)


def test_a_broken_transfer_is_resumed_with_the_blocks_that_are_missing(
    one_rank: Trainer, files: FetchedFiles
) -> None:
    asked = one_rank.stage()
    blocks = len(one_rank.parts[0].blocks)
    faults: list[Fault] = ["none"] * 20
    with (
        source(one_rank, *faults, *["cut"] * 1000) as broken,
        pytest.raises(FetchFailed, match="from rank 0 at"),
    ):
        files.fetch(replace(asked, ranks=[broken.location()]))
    assert held(files) == [asked.checksum] and files._whole is None
    with source(one_rank) as whole:
        assert one_rank.has_sent(files.fetch(replace(asked, ranks=[whole.location()])).file)
        assert len(whole.asked) == blocks - 20


FAULTS: list[Fault] = ["none", "cut", "damage", "short", "gone"]


@settings(max_examples=15)
@given(
    ranks=st.integers(1, 3),
    of_rank=st.lists(st.sampled_from(FAULTS), max_size=80),
    of_peer=st.lists(st.sampled_from([*FAULTS, "not yet"]), max_size=80),
    holds_the_version_before=st.booleans(),
)
def test_whatever_breaks_a_version_is_whole_or_it_is_not_there(
    ranks: int,
    of_rank: list[Fault],
    of_peer: list[Fault],
    holds_the_version_before: bool,
) -> None:
    trainer, files = Trainer(ranks), FetchedFiles(TOKEN)
    with pytest.MonkeyPatch.context() as patch, closing(trainer):
        patch.setattr(fetched_files, "BACKOFF_S", 0.001)
        first = trainer.stage()
        if holds_the_version_before:
            files.fetch(first)
        trainer.step()
        order = trainer.stage()
        with source(trainer, *of_rank) as broken, source(trainer, *of_peer) as peer:
            order = replace(peers_of(order, peer.location()), ranks=[broken.location()] * ranks)
            while True:
                try:
                    report = files.fetch(order)
                    break
                except FetchFailed:
                    assert files._whole is None or files._whole.header.checksum == first.checksum
        assert trainer.has_sent(report.file)


def peers_of(order: FetchOrder, *peers: Location) -> FetchOrder:
    """Returns the order of the last of several machines, of which these are the others."""
    return replace(order, peers=[*peers, NOBODY], number=len(peers))


@pytest.mark.parametrize("fault", ["damage", "cut", "gone", "stall", "not yet"])
def test_a_machine_that_fails_once_or_has_nothing_new_for_long_is_asked_no_more(
    fault: Fault, one_rank: Trainer, files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 0.2)
    asked = one_rank.stage()
    with source(one_rank, *[fault] * 10_000) as peer:
        report = files.fetch(peers_of(asked, peer.location()))
    asks = len(peer.asked) <= fetched_files.THREADS
    assert report.from_peers == 0 if fault == "not yet" else asks
    assert one_rank.has_sent(report.file)


def test_a_stalled_transfer_ends_at_its_deadline_with_each_reason(
    one_rank: Trainer, files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 1.5)
    asked = one_rank.stage()
    with (
        source(one_rank, *["stall"] * 1000) as silent,
        pytest.raises(FetchFailed, match="from rank 0 at .*: timed out; the deadline of 1 s"),
    ):
        files.fetch(replace(asked, ranks=[silent.location()], deadline_s=1.0))


def test_without_room_nothing_is_written(
    one_rank: Trainer, files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = one_rank.stage()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64))
    with pytest.raises(OSError, match="GiB are free"):
        files.fetch(asked)
    assert held(files) == []


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}]
)
def test_without_the_token_a_rank_serves_nothing(header: dict[str, str], trainer: Trainer) -> None:
    version = trainer.stage().checksum
    for rank, location in enumerate(trainer.locations):
        for what in ("header", "delta", "0"):
            status, body = call(location.url, "GET", f"{PARTS}{version}/{rank}/{what}", header)
            assert status == 401 and TOKEN.encode() not in body and len(body) < 200


def test_with_tls_only_the_named_certificate_is_trusted(
    files: FetchedFiles, tmp_path: Path
) -> None:
    own, other = self_signed(tmp_path, "own"), self_signed(tmp_path, "other")
    with closing(Trainer(2, Endpoint(tls_cert=own[0], tls_key=own[1]))) as trainer:
        asked = trainer.stage()
        url = asked.ranks[0].url
        assert url.startswith("https://") and "PRIVATE" not in asked.ranks[0].certificate
        for cert in (other[0], signed_by(tmp_path, own, "child")[0]):
            wrong = Location(url, first_certificate(cert))
            with pytest.raises(FetchFailed, match="certificate"):
                files.fetch(replace(asked, ranks=[wrong, wrong]))
        plain = Location(url.replace("https", "http"))
        with pytest.raises(FetchFailed):
            files.fetch(replace(asked, ranks=[plain, plain]))
        assert trainer.has_sent(files.fetch(asked).file)
