"""Where the trainer's end of an NCCL transfer is found, as far as it goes without a GPU."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lrl.weights.nccl import local_address_for


class Routed(socket.socket):
    """A kernel that would send from 10.0.0.1 to any other machine of that network, and from a machine to itself."""

    def connect(self, target: Any) -> None:
        self.target = target

    def getsockname(self) -> Any:
        others = self.target[0].startswith("10.0.0.") and self.target[0] != "10.0.0.1"
        return ("10.0.0.1" if others else self.target[0], 40000)


@pytest.mark.parametrize(
    ("urls", "address"),
    [
        (["http://127.0.0.1:8000", "https://127.0.0.1:8001"], "127.0.0.1"),
        (["https://10.0.0.1:8000"], "127.0.0.1"),
        (["http://127.0.0.1:8000", "https://10.0.0.8:8000"], "10.0.0.1"),
        (["https://10.0.0.8:8000", "http://127.0.0.1:8000"], "10.0.0.1"),
        (["http://[::1]:8000"], "127.0.0.1"),
    ],
)
def test_the_transfer_stays_on_loopback_unless_a_generator_is_elsewhere(
    urls: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", Routed)
    assert local_address_for(urls) == address


def test_the_kernel_is_asked_and_nothing_is_sent() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.setblocking(False)
        assert local_address_for([f"http://127.0.0.1:{ear.getsockname()[1]}"]) == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            ear.recv(1)
