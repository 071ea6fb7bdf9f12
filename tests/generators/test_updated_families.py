"""An update reaches every layer of every family of models, on vLLM's own engine; so do adapters.

Covers lrl/vllm_plugin/engines.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lrl.generators.settings import ServerSettings, cpu_environment

TRIED = ("Qwen3Moe", "Gemma2", "Phi3", "Qwen2-bf16", "Qwen3-fp8")
"""A part of the families: one that is new to vLLM takes ten seconds. The program has them all."""
SAME = 1e-5
"""Nats a token between two programs that compute the same in float32; most were off by 2e-7."""
MERGED = 1e-4
"""The same for adapters, whose product is large here: Gemma2 was off by 4e-5."""
SAME_IN_EIGHT_BITS = 0.03
"""The same when one of them has its matrices in float8; it was off by 0.006 as loaded, and by 0.012
after an update."""


def test_after_an_update_every_family_computes_what_the_policy_computes(tmp_path: Path) -> None:
    own = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_PLUGINS": "lrl",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "tests.generators.updated_families", str(tmp_path), *TRIED]
    environment = own | cpu_environment(ServerSettings(), dict(own))
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [line["family"] for line in lines] == list(TRIED)
    assert {line["family"]: line["loaded"] for line in lines if line["loaded"] > limit(line)} == {}
    assert {
        line["family"]: line["updated"] for line in lines if line["updated"] > limit(line)
    } == {}
    assert all(line["changed"] > 0.1 for line in lines), (
        "so a layer that no update reached would be seen"
    )
    merged = {
        line["family"]: line["adapted"]
        for line in lines
        if line["adapted"] > max(limit(line), MERGED)
    }
    assert merged == {}
    assert all(line["changed_by_adapters"] > 2 * limit(line) for line in lines), (
        "so unmerged ones would be seen"
    )


def limit(line: dict[str, Any]) -> float:
    return SAME_IN_EIGHT_BITS if line["family"].endswith("-fp8") else SAME
