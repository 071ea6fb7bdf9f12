"""The NCCL transport without vLLM: how a transfer that cannot end is ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.errors import CollectiveBroken, RankLostError
from lrl.system.event_loop import LoopThread
from lrl.weights import nccl
from lrl.weights.nccl import Nccl
from lrl.weights.pool_calls import INIT, UPDATE, PoolCalls
from lrl.weights.transport import find_transport
from tests.weights.model_sync import make_generators
from tests.weights.whole_weights import WholeWeights

ROOT = Path(__file__).parents[2]


class Ends:
    """Both ends of one collective: the calls to two generators, of which none is answered, and the
    trainer's own part."""

    def __init__(self, loop: LoopThread, deadline_s: float = 300.0) -> None:
        self.generators = make_generators()
        self.own: Future[str] = Future()
        self.calls = PoolCalls(loop, deadline_s, deadline_s, collective=True)
        self.calls.version = 3
        self.aborted: list[bool] = []
        for generator in self.generators:
            client: Any = generator.client
            client.stuck = UPDATE
            client.updating = True
        self.calls.begin(self.generators)

    def meet(self) -> None:
        transport = Nccl(self, "pool")
        transport._meet(self.calls, UPDATE, lambda one: {"update_info": {"value": 7}}, self.own)

    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None:
        self.aborted.append(abort)


def test_a_generator_that_fails_ends_the_collective_for_all_that_wait(loop: LoopThread) -> None:
    ends = Ends(loop)
    ends.generators[1].client.stuck = ""
    ends.generators[1].client.failing = {UPDATE: 1}
    with pytest.raises(
        CollectiveBroken, match="/update_weights for weight version 3 broke off.*generator 1 failed"
    ):
        ends.meet()
    assert ends.aborted == [True] and ends.calls.participants == []
    assert "answered 500" in ends.calls.failed[ends.generators[1]]
    assert "nothing ends it" in ends.calls.failed[ends.generators[0]]


def test_a_generator_that_is_evicted_meanwhile_ends_the_collective(loop: LoopThread) -> None:
    ends = Ends(loop)
    timer = threading.Timer(0.3, ends.generators[1].evict, ["its process has ended"])
    timer.start()
    with pytest.raises(CollectiveBroken, match="generator 1"):
        ends.meet()
    assert ends.calls.failed[ends.generators[1]] == "its process has ended"


def test_at_the_deadline_who_has_answered_is_not_to_blame(loop: LoopThread) -> None:
    ends = Ends(loop, deadline_s=0.5)
    ends.generators[0].client.stuck = ""
    with pytest.raises(CollectiveBroken, match="broke off.*generator 1 failed"):
        ends.meet()
    assert ends.aborted == [True] and ends.calls.participants == ends.generators[:1]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("NCCL error: remote process exited"), CollectiveBroken),
        (torch.OutOfMemoryError("buffers"), torch.OutOfMemoryError),
        (RankLostError("another rank"), RankLostError),
    ],
)
def test_an_error_of_nccl_in_the_trainer_breaks_the_collective_and_any_other_is_raised_as_it_is(
    loop: LoopThread, error: Exception, raised: type[Exception]
) -> None:
    ends = Ends(loop)
    ends.own.set_exception(error)
    with pytest.raises(raised, match=str(error)):
        ends.meet()
    assert ends.aborted == [True]


def test_a_signal_ends_the_trainers_part(loop: LoopThread) -> None:
    def told() -> None:
        raise SystemExit(143)

    ends = Ends(loop)
    ends.calls.interrupted = told
    with pytest.raises(SystemExit):
        ends.meet()
    assert ends.aborted == [True]


def test_both_ends_are_waited_for(loop: LoopThread) -> None:
    ends = Ends(loop)
    for generator in ends.generators:
        generator.client.stuck = ""
    threading.Timer(0.3, ends.own.set_result, ["sent"]).start()
    ends.meet()
    assert ends.aborted == [False] and ends.own.done()
    assert [generator.client.holds for generator in ends.generators] == [7, 7]


def test_nobody_enters_a_collective_without_one_that_is_lost(loop: LoopThread) -> None:
    ends = Ends(loop)
    ends.generators[1].evict("its process has ended")
    with pytest.raises(CollectiveBroken):
        ends.meet()
    assert ends.generators[0].client.posted == []


def test_every_worker_answers_before_a_communicator_is_made(loop: LoopThread) -> None:
    release = "/shutdown_weight_transfer_engine"
    generators = make_generators()
    calls = PoolCalls(loop, 5.0, 5.0, collective=True)
    calls.begin(generators)
    generators[1].client.failing = {release: 1}
    with pytest.raises(CollectiveBroken, match=release):
        Nccl(WholeWeights(lambda: iter(())), "run-0").connect(calls)
    assert all(INIT not in generator.client.posted for generator in generators)


class Hanging:
    """A communicator on a GPU that never returns."""

    disabled = False
    device = torch.device("cpu")
    comm = None
    nccl = SimpleNamespace(ncclCommAbort=lambda comm: threading.Event().wait())


def test_a_communicator_is_of_no_use_from_the_moment_of_its_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.1)
    hanging = Hanging()
    nccl.abort(hanging)
    assert hanging.disabled
    nccl.abort(None)
    nccl.abort(hanging)  # it may be repeated


STUCK = """
import atexit
import threading
atexit.register(threading.Event().wait)  # as a library that waits for the GPU when it is unloaded
from lrl.errors import StuckTransfer
from lrl.system.event_loop import start_daemon_call
from lrl.weights import nccl
from lrl.weights.nccl import Broadcast
nccl.abort = lambda communicator: None
broadcast = Broadcast()
broadcast._joined.set_result(None)
broadcast._sent = start_daemon_call(threading.Event().wait, "a broadcast that never ends")
try:
    broadcast.end(True, 0.1)
except StuckTransfer as error:
    print("saved;", error)
    raise
"""


def test_a_broadcast_that_cannot_be_ended_ends_the_run_and_its_process() -> None:
    command = [sys.executable, "-c", STUCK]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and ended.stdout.startswith(
        "saved; The broadcast of the weights has not ended"
    )
    assert "StuckTransfer" in ended.stderr


def test_what_every_member_must_have_alike_is_nccls_and_no_machines_own() -> None:
    of_machine = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_HOSTID": "a", "NCCL_DEBUG": "INFO"}
    own = {"NCCL_ALGO": "Ring", "PATH": "/bin"} | of_machine
    assert find_transport("nccl").common_environment(own) == {"NCCL_ALGO": "Ring"}
    assert find_transport("shared_memory").common_environment(own) == {}
