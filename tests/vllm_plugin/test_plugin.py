"""What the plugin does in each of vLLM's processes."""

import subprocess
import sys

import pytest
import torch

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
