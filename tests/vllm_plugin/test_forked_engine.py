"""A generator of one device on a CPU imports vLLM once."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lrl.generators import cpu_backend
from lrl.generators.settings import ServerSettings
from lrl.vllm_plugin import forked_engine
from lrl.vllm_plugin.forked_engine import METHOD
from tests.lent_server import LentServer

pytest.importorskip("vllm")


def test_the_engine_of_a_real_server_is_a_fork(lent_server: LentServer) -> None:
    names = [process.name() for process in lent_server.processes()]
    assert len(names) == 2 and "VLLM::EngineCore" in names, (
        "a spawned engine has multiprocessing's tracker beside it"
    )


@pytest.mark.parametrize(
    ("executor", "own", "method"),
    [("uni", {}, "fork"), ("uni", {METHOD: "spawn"}, "spawn"), ("mp", {}, "spawn")],
)
def test_an_engine_is_spawned_if_it_has_workers_or_the_user_says_so(
    executor: str, own: dict[str, str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    def spawn(cls: Any, config: Any) -> None:
        os.environ[METHOD] = "spawn"

    if not current_platform.is_cpu():
        pytest.skip("only vLLM's CPU build spawns its engines")
    monkeypatch.setenv(METHOD, cpu_backend.environment(ServerSettings(), own)[METHOD])
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(spawn))
    for _ in range(2):  # vLLM loads a plugin more than once
        forked_engine.install()
    parallel = SimpleNamespace(distributed_executor_backend=executor)
    type(current_platform).check_and_update_config(SimpleNamespace(parallel_config=parallel))
    assert os.environ[METHOD] == method
