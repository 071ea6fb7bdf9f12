"""An update reaches every layer of every family of models, on vLLM's own engine; so do adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lrl.generators import cpu_backend
from lrl.generators.settings import ServerSettings

TRIED = ("Qwen2", "Qwen3Moe", "Mixtral", "Gemma2", "Phi3", "Olmo2", "GPTNeoX")
"""A part of the families: one that is new to vLLM takes ten seconds. The program has them all."""
SAME = 1e-5
"""Nats a token between two programs that compute the same in float32; most were off by 2e-7."""


def test_after_an_update_every_family_computes_what_the_policy_computes(tmp_path: Path) -> None:
    own = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "VLLM_PLUGINS": "lrl", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "tests.generators.updated_families", str(tmp_path), *TRIED]
    environment = own | cpu_backend.environment(ServerSettings(), dict(own))
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-5000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [line["family"] for line in lines] == list(TRIED)
    assert {line["family"]: line["loaded"] for line in lines if line["loaded"] > SAME} == {}
    assert {line["family"]: line["updated"] for line in lines if line["updated"] > SAME} == {}
    assert all(line["changed"] > 0.1 for line in lines), "so a layer that no update reached would be seen"
    assert {line["family"]: line["adapted"] for line in lines if line["adapted"] > SAME} == {}
    assert all(line["changed_by_adapters"] > 0.01 for line in lines), "so adapters that were not merged would be seen"
