"""Pull between network namespaces, which are machines to the network.

Covers lrl/weights/pull.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.weight_links import Trainer, generators_on, slow_links
from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.system.endpoint import Endpoint, Location
from lrl.weights.version_file import check_file
from tests.certificates import openssl
from tests.leftovers import wait_for
from tests.network_namespace import HERE, THERE, network_namespace
from tests.weights.fetching_generators import TOKEN, fetching_generators
from tests.weights.test_pull import PullScene


@pytest.fixture
def namespace() -> Iterator[str]:
    with network_namespace() as name:
        yield name


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """Of both machines, with its key."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    names = f"subjectAltName=IP:{HERE},IP:{THERE},IP:127.0.0.1"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    place = ["-subj", "/CN=lrl", "-keyout", key, "-out", cert, "-addext", names]
    openssl("req", "-x509", *curve, *place)
    os.chmod(key, 0o600)
    return cert, key


def far(url: str, settings: ServerSettings, location: Location) -> Generator:
    """The generator at `url`, as the trainer knows it."""
    server: Any = SimpleNamespace(name="generator 7", number=7, url=url, location=location)
    vars(server).update(trust=location.context(), token=TOKEN, settings=settings, alive=True)
    server.log_tail = lambda: ""
    return Generator(server, 4)


def test_a_generator_on_another_machine_fetches_whole_and_delta(
    namespace: str, certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    (tmp_path / "far").mkdir()
    place = [str(tmp_path / "far"), THERE, cert, key]
    words = [sys.executable, "-m", "tests.weights.far_generator", *place]
    settings = ServerSettings(dtype="bfloat16", host="0.0.0.0", tls_cert=cert, tls_key=key)
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = int(url.rpartition(":")[2])
        theirs = Endpoint(THERE, cert, key)
        with fetching_generators(1, tmp_path, settings) as own:
            scene = PullScene([*own, far(url, settings, theirs.location(port))])
            for _ in range(2):
                assert scene.move() == {} and scene.hold(*own)
            fetched, sent = scene.transport.fetched_bytes, scene.transport.sent_bytes
            expected = {
                name: weight.double().sum().item()
                for name, weight in scene.policy.as_bfloat16.items()
            }
            scene.close()
        message, _ = process.communicate("", timeout=300)
    finally:
        process.kill()
    found = json.loads(message)
    assert found["version"] == "2" and found["sums"] == pytest.approx(expected, abs=1e-9)
    assert fetched == sent > 0  # one listens on loopback, which the other cannot reach


@pytest.mark.parametrize("whose", ["a generator's", "a trainer rank's"])
def test_a_link_that_is_cut_in_mid_transfer_and_mended_costs_only_time(
    whose: str, namespace: str, tmp_path: Path
) -> None:
    with slow_links(4, mbit=100) as machines, ThreadPoolExecutor() as pool:
        trainer, generators = Trainer(machines[:2], 10.0), generators_on(machines[2:], tmp_path)
        version = trainer.stage().version
        fetches = [
            pool.submit(fetch) for fetch in trainer.fetches(version, generators, machines[2:])
        ]
        files = generators[0].routes.files
        wait_for(lambda: files._draft and files._draft.here, what="the first block")
        cut = machines[2 if whose == "a generator's" else 1]
        cut.cut()
        time.sleep(1.0)
        assert not any(fetch.done() for fetch in fetches)
        cut.mend()
        checksum = trainer.stagings[0].parts[version].header.checksum
        for fetch in fetches:
            check_file(fetch.result(300).file, checksum)
        for staging in trainer.stagings:
            staging.close()
        for generator in generators:
            generator.die()
