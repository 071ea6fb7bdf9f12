"""An engine that is alone on its device does not wake hundreds of times a second for process groups
of one rank."""

from __future__ import annotations

from pathlib import Path

from tests.lent_server import LentServer


def test_the_process_groups_of_a_real_engine_share_one_thread_of_gloo(
    lent_server: LentServer,
) -> None:
    (engine,) = (
        process for process in lent_server.processes() if process.name() == "VLLM::EngineCore"
    )
    threads = [
        Path(f"/proc/{engine.pid}/task/{thread.id}/comm").read_text().strip()
        for thread in engine.threads()
    ]
    assert threads.count("gloo_tcp_loop") == 1, "vLLM makes 13 groups"
