"""A generator that fetches its weights, from sources that break, stall, lie and die.

Covers lrl/weights/fetch_order.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from lrl.errors import FetchFailed
from lrl.system.endpoint import Endpoint, Location, first_certificate
from lrl.vllm_plugin import fetched_files
from lrl.vllm_plugin.fetched_files import FetchedFiles
from lrl.weights.delta import write_delta
from lrl.weights.fetch_order import FILES, FetchOrder, RemoteFile
from lrl.weights.pull import FileServer
from tests.certificates import self_signed, signed_by
from tests.http_call import call
from tests.weights.scripted_source import Fault, scripted

TOKEN = "secret"
DEADLINE_S = 300.0
NOBODY = Location("http://127.0.0.1:9")
"""A source that has died: nothing listens at the port."""
V1 = os.urandom(2**20)
V2 = V1[:5000] + os.urandom(100) + V1[5100:]


def remote(name: str, content: bytes) -> RemoteFile:
    return RemoteFile(name, len(content), xxh3_64_intdigest(content))


def order(content: bytes, *sources: Location, deadline_s: float = DEADLINE_S) -> FetchOrder:
    return FetchOrder(remote("w", content), list(sources), deadline_s)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FetchedFiles:
    monkeypatch.setattr(fetched_files, "BACKOFF_S", 0.001)
    (tmp_path / "shm").mkdir()
    return FetchedFiles(tmp_path / "shm", TOKEN)


def names(files: FetchedFiles) -> set[str]:
    return {path.name for path in files._folder.iterdir()}


class Trainer:
    """The files and the server of rank 0."""

    def __init__(self, folder: Path, endpoint: Endpoint) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.server = FileServer(endpoint, TOKEN)
        self.orders = 0

    @property
    def location(self) -> Location:
        return self.endpoint.location(self.server.port)

    def stage(self, name: str, content: bytes, base: str = "") -> FetchOrder:
        """Serves a version, with the delta to `base` if it is named."""
        (self.folder / name).write_bytes(content)
        served = {name: self.folder / name}
        difference = None
        if base:
            path = self.folder / f"{name}-delta"
            assert write_delta(self.folder / base, self.folder / name, path)
            difference = remote(path.name, path.read_bytes())
            served[path.name] = path
        self.server.files = served
        return FetchOrder(remote(name, content), [self.location], DEADLINE_S, difference, base)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    (tmp_path / "trainer").mkdir()
    made = Trainer(tmp_path / "trainer", Endpoint())
    yield made
    made.server.close()


def test_a_newcomer_fetches_the_whole_and_one_that_holds_the_version_before_the_delta(
    trainer: Trainer, files: FetchedFiles
) -> None:
    first = files.fetch(trainer.stage("v1", V1))
    assert (first.how, first.received) == ("whole", [len(V1)]) and Path(
        first.file
    ).read_bytes() == V1
    second = files.fetch(trainer.stage("v2", V2, base="v1"))
    assert second.how == "delta" and second.received[0] < len(V2) / 10
    assert Path(second.file).read_bytes() == V2 and names(files) == {"v2", "v2-delta"}


def test_one_that_missed_a_version_fetches_the_whole_and_keeps_no_other(
    trainer: Trainer, files: FetchedFiles
) -> None:
    files.fetch(trainer.stage("v1", V1))
    trainer.stage("v2", V2)
    third = files.fetch(trainer.stage("v3", V1[::-1][:100] + V2[100:], base="v2"))
    assert third.how == "whole" and names(files) == {"v3"}


def test_what_is_held_is_not_fetched_again(trainer: Trainer, files: FetchedFiles) -> None:
    asked = trainer.stage("v1", V1)
    path = files.fetch(asked).file
    trainer.server.close()
    again = files.fetch(asked)
    assert (again.how, again.received, again.file) == ("held", [0], path)


def test_a_base_that_was_damaged_is_noticed_and_the_whole_is_fetched(
    trainer: Trainer, files: FetchedFiles
) -> None:
    Path(files.fetch(trainer.stage("v1", V1)).file).write_bytes(V1[:-1] + bytes([V1[-1] ^ 1]))
    second = files.fetch(trainer.stage("v2", V2, base="v1"))
    assert second.how == "whole" and Path(second.file).read_bytes() == V2


def test_a_broken_transfer_is_resumed_where_it_broke(files: FetchedFiles) -> None:
    with scripted(V1, "cut", "cut") as source:
        report = files.fetch(order(V1, source.location))
        assert source.starts == [0, len(V1) // 2, len(V1) * 3 // 4]
    assert report.received == [len(V1)] and Path(report.file).read_bytes() == V1


def test_a_transfer_that_broke_at_one_source_goes_on_at_the_next(files: FetchedFiles) -> None:
    with scripted(V1, "cut") as peer, scripted(V1) as trainer:
        report = files.fetch(order(V1, peer.location, trainer.location))
        assert (peer.starts, trainer.starts) == ([0], [len(V1) // 2])
    assert report.received == [len(V1) // 2, len(V1) // 2] and Path(report.file).read_bytes() == V1


def test_a_source_that_sends_all_again_is_taken_from_the_start(files: FetchedFiles) -> None:
    with scripted(V1, "cut", "whole instead of the rest") as source:
        assert Path(files.fetch(order(V1, source.location)).file).read_bytes() == V1


@pytest.mark.parametrize("fault", ["damage", "short"])
def test_a_damaged_file_is_fetched_again_and_never_gets_its_name(
    fault: Fault, files: FetchedFiles
) -> None:
    with scripted(V1, fault) as source:
        assert Path(files.fetch(order(V1, source.location)).file).read_bytes() == V1
        assert source.starts == [0, 0]
    files._keep_only()
    with scripted(V1, *[fault] * fetched_files.ATTEMPTS) as source:
        with pytest.raises(
            FetchFailed, match="checksum" if fault == "damage" else "bytes, and .* are missing"
        ):
            files.fetch(order(V1, source.location))
        assert len(source.starts) == fetched_files.ATTEMPTS
    assert names(files) == set()


def test_a_source_that_died_costs_only_the_way_to_the_next(files: FetchedFiles) -> None:
    with scripted(V1) as trainer:
        report = files.fetch(order(V1, NOBODY, trainer.location))
    assert report.received == [0, len(V1)]


def test_a_source_that_stalls_is_left_for_the_next(
    files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 0.2)
    with scripted(V1, "stall") as peer, scripted(V1) as trainer:
        report = files.fetch(order(V1, peer.location, trainer.location))
        assert trainer.starts == [len(V1) // 2] and Path(report.file).read_bytes() == V1


def test_a_stalled_transfer_ends_at_its_deadline_with_each_reason(
    files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 300.0)
    begun = time.monotonic()
    with scripted(V1, *["stall"] * 9) as source, pytest.raises(FetchFailed) as failed:
        files.fetch(order(V1, source.location, deadline_s=1.0))
    assert time.monotonic() - begun < 200  # and not after `STALL_S`
    assert f"{source.url} after" in str(failed.value) and f"of {len(V1)} bytes: timed out" in str(
        failed.value
    )
    assert names(files) == set()


def test_a_new_order_ends_the_one_before(
    files: FetchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 0.3)
    failures: list[BaseException] = []

    def fetch(content: bytes, location: Location) -> None:
        try:
            files.fetch(order(content, location))
        except FetchFailed as error:
            failures.append(error)

    with scripted(V1, *["stall"] * 9) as stalled, scripted(V2) as trainer:
        older = threading.Thread(target=fetch, args=(V1, stalled.location))
        older.start()
        while not stalled.starts:
            time.sleep(0.005)
        assert Path(files.fetch(order(V2, trainer.location)).file).read_bytes() == V2
        older.join(DEADLINE_S)
        assert len(failures) == 1 and len(stalled.starts) == 1


def test_without_room_nothing_is_asked_for(files: FetchedFiles) -> None:
    with scripted(V1) as source:
        huge = FetchOrder(RemoteFile("w", 2**60, 0), [source.location], DEADLINE_S)
        with pytest.raises(OSError, match="GiB free and the weights take"):
            files.fetch(huge)
        assert source.starts == []


@pytest.mark.parametrize("name", ["../secret", "..%2Fsecret", "", "v1.draft", "v2"])
def test_only_what_is_staged_is_served(name: str, trainer: Trainer, files: FetchedFiles) -> None:
    trainer.stage("v1", V1)
    (trainer.folder.parent / "secret").write_text("secret")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert call(trainer.location.url, "GET", FILES + name, headers)[0] == 404
    assert files.find(name) is None
    (files._folder / "w.7.draft").touch()
    assert files.find("w.7.draft") is None  # nor what is not whole


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}]
)
def test_without_the_token_the_trainer_serves_nothing(
    header: dict[str, str], trainer: Trainer
) -> None:
    trainer.stage("v1", V1)
    status, body = call(trainer.location.url, "GET", FILES + "v1", header)
    assert status == 401 and TOKEN.encode() not in body and len(body) < 200


def test_a_generator_of_another_run_gets_nothing(trainer: Trainer, files: FetchedFiles) -> None:
    files._token = "another token"
    with pytest.raises(FetchFailed, match="answered 401"):
        files.fetch(trainer.stage("v1", V1))


def test_with_tls_only_the_named_certificate_is_trusted(
    files: FetchedFiles, tmp_path: Path
) -> None:
    own, other = self_signed(tmp_path, "own"), self_signed(tmp_path, "other")
    trainer = Trainer(tmp_path, Endpoint(tls_cert=own[0], tls_key=own[1]))
    try:
        asked = trainer.stage("v1", V1)
        assert (
            asked.sources[0].url.startswith("https://")
            and "PRIVATE" not in asked.sources[0].certificate
        )
        for cert in (other[0], signed_by(tmp_path, own, "child")[0]):
            wrong = Location(asked.sources[0].url, "certificate", first_certificate(cert))
            with pytest.raises(FetchFailed, match="certificate"):
                files.fetch(FetchOrder(asked.whole, [wrong], DEADLINE_S))
        with pytest.raises(FetchFailed):
            files.fetch(
                FetchOrder(
                    asked.whole,
                    [Location(trainer.location.url.replace("https", "http"))],
                    DEADLINE_S,
                )
            )
        assert Path(files.fetch(asked).file).read_bytes() == V1
    finally:
        trainer.server.close()
