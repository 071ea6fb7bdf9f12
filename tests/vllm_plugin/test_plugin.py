"""What the plugin does in each of vLLM's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.generators.settings import ServerSettings, cpu_environment
from lrl.vllm_plugin.plugin import METHOD, let_engines_fork
from tests.lent_server import LentServer

ASKS_LINUX = """
import ctypes

def may_use_amx():
    found = ctypes.c_uint64()
    arch_prctl, permitted, tiles = 158, 0x1022, 18
    assert ctypes.CDLL(None).syscall(arch_prctl, permitted, ctypes.byref(found)) == 0
    return bool(found.value >> tiles & 1)

from lrl.vllm_plugin.plugin import register
before = may_use_amx()
register()
print(before, may_use_amx())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_an_engine_in_bfloat16_may_use_amx_before_its_first_request() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASKS_LINUX], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split()[-2:] == ["False", "True"]


def test_the_engine_of_a_real_server_is_a_fork(lent_server: LentServer) -> None:
    assert len(lent_server.processes()) == 2, "a spawned engine has multiprocessing's tracker, too"


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
    monkeypatch.setenv(METHOD, cpu_environment(ServerSettings(), own)[METHOD])
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(spawn))
    let_engines_fork()
    parallel = SimpleNamespace(distributed_executor_backend=executor)
    type(current_platform).check_and_update_config(SimpleNamespace(parallel_config=parallel))
    assert os.environ[METHOD] == method
