"""Weights by NCCL: every trainer rank broadcasts the rows that it holds to every worker of every
generator (`lrl.weights.broadcast`); the generators' end is `lrl.vllm_plugin.engines`.

The members meet by NCCL's unique id, which travels over the route that asks for the run's token;
vLLM's own way to meet is a store that asks for none.

Nothing ends a broadcast inside vLLM when a member is lost. The ranks abort their part, every
generator that has not answered is evicted, which kills its server, and the others connect anew.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from lrl.errors import CollectiveBroken, RankLostError
from lrl.generators.generator import Generator
from lrl.weights.broadcast import JoinOrder, new_unique_id
from lrl.weights.pool_calls import INIT, UPDATE, Body, Failures, PoolCalls
from lrl.weights.transport import Machine, Transport

if TYPE_CHECKING:
    from lrl.generators.settings import ServerSettings

RELEASE = "/shutdown_weight_transfer_engine"
BUCKET_BYTES = 2**28
"""Bytes of weights that travel at once; one tensor more may come on top."""
OF_ONE_MACHINE = (
    "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_COMM_ID",
    "NCCL_CONF_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_RAS_ADDR",
)  # fmt: skip
"""NCCL's variables that name things of one machine, and those of its log; all others must agree in
a communicator."""
NOT_TENSOR_PARALLEL = ("pipeline-parallel", "data-parallel", "prefill-context-parallel")
"""Beginnings of the vLLM flags that add workers in another way."""


class Nccl(Transport):
    """The transport to generators on other GPUs than the trainer's."""

    backend = "nccl"
    collective = True

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """NCCL refuses two processes on one GPU, unless NCCL_HOSTID says that they are two machines
        (not run yet)."""
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.shares_device and "NCCL_HOSTID" not in os.environ:
            return "but the generator shares the trainer's GPU"
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Each worker needs a rank in the communicator."""
        for name, value in settings.extra_args.items():
            flag = name.strip("-").replace("_", "-")
            if flag.startswith(NOT_TENSOR_PARALLEL) and value not in (None, 1, "1"):
                return (
                    f"strategy.server.extra_args sets {name} to {value!r}, and "
                    "strategy.weight_transfer nccl counts the workers of a generator by tensor "
                    "parallelism alone. Leave it out and set strategy.server.tensor_parallel_size."
                )
        return ""

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Another host for each generator, where the trainer names its own (`refusal`)."""
        host = inherited.get("NCCL_HOSTID")
        return {} if host is None else {"NCCL_HOSTID": f"{host}-generator-{number}"}

    @classmethod
    def common_environment(cls, own: Mapping[str, str]) -> dict[str, str]:
        """NCCL's: members that disagree about one of them may wait for each other for ever."""
        common = (one for one in own if one.startswith("NCCL_") and one not in OF_ONE_MACHINE)
        return {name: own[name] for name in common}

    def connect(self, calls: PoolCalls) -> None:
        """Makes a communicator: the trainer's ranks, and behind them the workers of all generators.
        CollectiveBroken if one did not join."""
        calls.close_update()  # vLLM refuses to leave a communicator while one is open
        calls.each(
            RELEASE, lambda one: one.client.post(RELEASE, deadline_s=calls.silence_s), short=True
        )
        calls.need_all(RELEASE)  # every worker answers, before all wait for each other
        # The generators of a pool have one format.
        dtype = getattr(torch, calls.participants[0].server.settings.dtype)
        unique_id = new_unique_id()
        size = self.policy.ranks.size
        offsets: dict[Generator, dict[str, int]] = {}
        for generator in calls.participants:
            offsets[generator] = {"rank_offset": size}
            size += generator.server.settings.tensor_parallel_size
        order = JoinOrder(unique_id, size, dtype, BUCKET_BYTES)
        plan, joined = self.policy.join_broadcast(self.name, order)
        encoded = base64.b64encode(unique_id).decode()
        common = {"plan": plan, "unique_id": encoded, "world_size": size}
        self._meet(calls, INIT, lambda one: {"init_info": common | offsets[one]}, joined)

    def send(self, calls: PoolCalls) -> None:
        """See `Transport.send`; CollectiveBroken if a generator failed, and StuckTransfer if the
        abort did not end the broadcast."""
        sending = self.policy.send_broadcast(self.name)
        self._meet(calls, UPDATE, lambda one: {"update_info": {}}, sending)

    def _meet(self, calls: PoolCalls, route: str, body: Body, own: Future[Any]) -> None:
        """Waits for both ends of a collective: the generators, which a call to `route` starts, and
        `own` on rank 0.

        At the first failure none of them can be answered any more: all that wait are at fault, and
        the ranks abort their end.
        """
        failed, waiting = Failures(), set[Generator]()
        broken = f"{route} for weight version {calls.version} broke off"

        async def post(generator: Generator) -> None:
            waiting.add(generator)
            await generator.client.post(route, body(generator), deadline_s=calls.deadline_s)
            waiting.remove(generator)

        def watch() -> None:
            lost = [
                one.name for one in calls.participants if one in failed or one.eviction is not None
            ]
            if lost:
                raise CollectiveBroken(f"{broken}, because {' and '.join(lost)} failed.")
            _raise_as_broken(own, route)
            calls.interrupted()

        try:
            calls.exclude_evicted()
            calls.need_all(route)
            calls.try_each(route, post, failed=failed, interrupted=watch)
            watch()
            wait([own], calls.deadline_s)  # it is at its end, as those of the generators are
            _raise_as_broken(own, route)
        except BaseException:
            calls.exclude_evicted()
            why = f"{broken}, and nothing ends it in a generator."
            calls.exclude(dict.fromkeys(waiting, why) | failed, hopeless=True)
            self.policy.end_broadcast(self.name, True, calls.deadline_s)
            raise
        self.policy.end_broadcast(self.name, False, calls.deadline_s)


def _raise_as_broken(own: Future[Any], what: str) -> None:
    """Raises the error of the trainer's part, if it has one; NCCL's own as CollectiveBroken."""
    error = own.exception() if own.done() else None
    if isinstance(error, RuntimeError) and not isinstance(
        error, torch.OutOfMemoryError | RankLostError
    ):
        raise CollectiveBroken(f"{what} broke off in the trainer: {error}") from error
    if error is not None:
        raise error
