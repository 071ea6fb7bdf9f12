"""A server's command line and life cycle. For the life cycle a small HTTP program stands in for
vLLM."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch

import lrl
from lrl.errors import ServerError
from lrl.generators.server import Server, end_of, make_scratch, mixed_seed, run_seed
from lrl.generators.settings import ServerSettings
from lrl.members.join import JoiningGenerator
from lrl.members.registry import Kind
from lrl.members.run_members import join_spec
from lrl.system.endpoint import LOOPBACK
from tests.generators.model_fleet import Scripted
from tests.members.served_run import bare_run, client_of, served, spec_of

BREAKING = "print('\\n'.join(f'line {i}' for i in range(100))); raise SystemExit(3)"
SILENT = "import time; time.sleep(600)"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def build(
    folder: Path, kind: type[Server] = Server, devices: list[int] | None = None, **settings: Any
) -> Server:
    return kind(
        "a/model", ServerSettings(**settings), "shared_memory", devices or [], folder, 3, "test"
    )


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Server]:
    server = build(tmp_path, Scripted)
    yield server
    server.stop()


def test_a_server_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "lrl.py").write_text("raise SystemExit('the user's')")
    python = build(tmp_path).command()[:2]
    program = [*python, "-c", "import lrl; print(lrl.__file__)"]
    imported = subprocess.check_output(program, cwd=tmp_path, timeout=60, text=True)
    assert imported.strip() and not imported.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "--logprobs-mode processed_logprobs"),
        ({}, "--generation-config vllm"),
        ({}, f"--host {LOOPBACK}"),
        ({}, "--distributed-executor-backend uni"),
        ({"tensor_parallel_size": 2}, "--distributed-executor-backend mp"),
        ({"extra_args": {"block_size": 64}}, "--block-size 64"),
        ({"extra_args": {"swap_space": 7}}, "--swap-space 7"),
        ({"extra_args": {"kv-events-config": {"a": 1}}}, '--kv-events-config {"a": 1}'),
        ({"extra_args": {"enable_expert_parallel": True}}, "--enable-expert-parallel"),
        ({"extra_args": {"enable-prefix-caching": False}}, "--no-enable-prefix-caching"),
    ],
)
def test_sampling_stays_exact_and_the_users_flags_overrule_what_lrl_prefers(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    command = build(tmp_path, **settings).command()
    assert words in " ".join(command) and command.count(words.split()[0]) == 1


@pytest.mark.parametrize(
    ("settings", "own", "name", "value"),
    [
        ({}, None, "VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ({}, "0-3", "VLLM_CPU_OMP_THREADS_BIND", "0-3"),
        ({}, None, "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        ({}, "glibc.malloc.hugetlb=0", "GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"),
        ({}, "3", "OMP_NUM_THREADS", "3"),
        ({"threads": 2}, "3", "OMP_NUM_THREADS", "2"),
        ({"threads": 2}, None, "OMP_NUM_THREADS", "2"),
        ({}, None, "VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        *(({}, "1", name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        *(({}, "1", name, None) for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")),
        ({}, "expandable_segments:True", "PYTORCH_ALLOC_CONF", None),
        ({}, "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF", None),
        # Devices count within the trainer's own.
        ({"devices": [2, 3], "tensor_parallel_size": 2}, None, VISIBLE, "2,3"),
        ({"devices": [2, 3], "tensor_parallel_size": 2}, "4,5,6,7", VISIBLE, "6,7"),
        ({"devices": [1]}, "GPU-a,GPU-b", VISIBLE, "GPU-b"),
        ({}, "0", VISIBLE, ""),
        ({}, None, VISIBLE, ""),
    ],
)
def test_a_generators_environment_is_the_users_without_what_is_the_trainers_alone(
    settings: dict[str, Any],
    own: str | None,
    name: str,
    value: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    assert build(tmp_path, **settings).environment().get(name) == value


def test_a_transport_has_its_variables_and_its_routes_behind_the_token(tmp_path: Path) -> None:
    server = build(tmp_path)
    server.transport_environment = {"NCCL_HOSTID": "a-generator-0"}
    server.middleware = ("a.Route", "b.Route")
    assert server.environment()["NCCL_HOSTID"] == "a-generator-0"
    words = server.command()
    layers = [
        after for word, after in zip(words, words[1:], strict=False) if word == "--middleware"
    ]
    own = "lrl.vllm_plugin.write_route.WriteRoute"
    # vLLM puts the last one outermost.
    assert layers == [own, "a.Route", "b.Route", "lrl.system.auth.TokenMiddleware"]


def test_a_server_lives_from_start_to_stop_and_may_start_again(scripted: Server) -> None:
    assert scripted.log_tail() == ""
    seeds = set[str]()
    for _ in range(2):
        scripted.start()
        seeds.add(seed_of(Server.command(scripted)))
        scripted.wait_ready()
        assert scripted.alive
        scripted.stop()
        scripted.stop()
        assert not scripted.alive
    assert len(seeds) == 2, "it would draw its first numbers again"
    with pytest.raises(ServerError, match="does not run"):
        scripted.wait_ready()


def test_the_error_of_an_ended_server_has_its_status_and_its_log(
    scripted: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "program", BREAKING)
    scripted.start()
    with pytest.raises(ServerError, match="exit status 3") as caught:
        scripted.wait_ready()
    assert "line 99" in str(caught.value) and "line 1\n" not in str(caught.value)
    assert str(scripted.log_path) in str(caught.value)


def test_a_server_that_does_not_answer_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    server = build(tmp_path, Scripted, start_timeout_s=0.5)
    server.program = SILENT  # type: ignore[attr-defined]
    server.start()
    with pytest.raises(ServerError, match="start_timeout_s=0.5"):
        server.wait_ready()
    assert not server.alive


def test_a_supervisor_that_hangs_is_killed_with_its_processes(tmp_path: Path) -> None:
    server = build(tmp_path, Scripted, stop_timeout_s=0.5)
    server.start()
    server.wait_ready()
    assert server._supervisor is not None
    scratch = psutil.Process(server._supervisor.pid).children()[0].environ()["TMPDIR"]
    os.kill(server._supervisor.pid, signal.SIGSTOP)
    server.stop()
    assert not os.path.exists(scratch) and refuses(server.port)


def refuses(port: int) -> bool:
    """Whether no process listens on the port."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_end_of_a_log_has_the_cause_once_however_much_follows_it() -> None:
    died = "(EngineCore pid=7) ERROR 11-28 00:21:34 [core.py:1512] RuntimeError: head_dim=16"
    ends = (
        "(APIServer pid=6) ERROR 11-28 00:21:34 [a.py:9] EngineDeadError: See stack trace (above)"
    )
    follows = ["(APIServer pid=6) WARNING 11-28 00:21:34 [launcher.py:298] ", *["INFO: bye"] * 29]
    long = end_of("\n".join([died, ends, *follows])).splitlines()
    assert long == ["RuntimeError: head_dim=16", "...", *["INFO: bye"] * 20]
    assert end_of(f"{died}\n{ends}") == f"{died}\n{ends}"


# ---- seeds: no two generators of a run draw the same numbers, and none draws any again


def seed_of(command: list[str]) -> str:
    assert command.count("--seed") == 1
    return command[command.index("--seed") + 1]


def test_no_start_of_any_generator_has_the_seed_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed, steps, number, starts in itertools.product(range(3), (0, 1, 100), range(4), range(3)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        found.append(mixed_seed(run_seed(steps), number, starts))
    assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 2**31
    assert mixed_seed(run_seed(100), 3, 2) == found[-1], "the same run has the same seeds"


def servers_of_a_run(
    folder: Path, seed: int, checkpoint: str | None = None
) -> tuple[list[str], int]:
    """Returns the seeds of a run's two generators, and that which it tells those that join."""
    L.seed_everything(seed, verbose=False)
    strategy = lrl.AsyncSingleDevice(generator_devices=2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    run = bare_run(strategy, folder, checkpoint)
    servers = strategy.make_servers(run)
    return [seed_of(server.command()) for server in servers], join_spec(run, 2, {}).seed


def test_seed_everything_reaches_the_generators_and_a_resume_goes_on_with_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    first = servers_of_a_run(tmp_path, 5)
    assert servers_of_a_run(tmp_path, 5) == first
    resumed = servers_of_a_run(tmp_path, 5, "runs/epoch=0-step=7.ckpt")
    runs = [first, servers_of_a_run(tmp_path, 6), resumed]
    assert len({seed for seeds, _ in runs for seed in seeds}) == 6
    assert len({told for _, told in runs}) == 3


def test_each_generator_that_joins_has_a_seed_of_the_run_and_its_own(tmp_path: Path) -> None:
    made: list[Server] = []
    for seed in (1, 2):
        with served(spec_of(seed=seed)) as run:
            for _ in range(2):
                client = client_of(run)
                joins = JoiningGenerator("", client, client.spec(), ServerSettings())
                joins.number = client.claim(kind=Kind.GENERATOR)
                made.append(joins.make_server("base", tmp_path))
    assert len({seed_of(server.command()) for server in made}) == 4
    assert seed_of(made[0].command()) == str(mixed_seed(1, made[0].number, 0))


def test_the_path_of_the_temporary_folder_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for usual in (tmp_path / "a", tmp_path / ("a" * 100)):
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        scratch = make_scratch()
        os.rmdir(scratch)
        assert len(scratch) + len("/") + 36 <= 107, "vLLM's sockets have names of 36 characters"
