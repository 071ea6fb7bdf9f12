"""The trust between a run and a joining process: owner of a file, identity of a process, machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lrl.generators.endpoint import first_certificate
from lrl.generators.settings import ServerSettings
from lrl.membership import join
from lrl.membership import registry as registry_module
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import Address, JoinSpec, Registry
from lrl.runtime import process_identity
from lrl.runtime.owner_only_files import UntrustedFile
from lrl.runtime.process_identity import ProcessIdentity
from tests.certificates import self_signed

ELSEWHERE = ProcessIdentity(machine="another one", pid=1, started=1)
OWN = join.LocalOverrides([], {})


def spec_of(transport: str = "shared_memory", **fields: object) -> JoinSpec:
    defaults = {"run_id": "ab12", "on_cpu": True, "generators": 1}
    return JoinSpec("base", asdict(ServerSettings()), transport, **defaults | fields)  # type: ignore[arg-type]


@pytest.fixture
def opened(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path)
    registry.open(spec_of())
    return registry


def test_files_are_read_as_written_and_closed_to_all_others(opened: Registry, tmp_path: Path) -> None:
    assert Registry(tmp_path).spec() == spec_of()
    assert (tmp_path / "fleet").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "fleet").iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o622, 0o640, 0o604])
def test_an_open_file_is_not_trusted(opened: Registry, tmp_path: Path, mode: int) -> None:
    (tmp_path / "fleet" / "run.json").chmod(mode)
    with pytest.raises(NotRunning, match=rf"run.json is not trusted.*{mode:04o}"):
        Registry(tmp_path).spec()


def test_nothing_in_an_open_folder_is_trusted(opened: Registry, tmp_path: Path) -> None:
    (tmp_path / "fleet").chmod(0o777)
    with pytest.raises(NotRunning, match="fleet is not trusted.*0777"):
        Registry(tmp_path).spec()
    with pytest.raises(UntrustedFile):
        opened.poll()


def test_another_users_file_is_not_trusted(opened: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet" / "generator-1.json").write_text("{}")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(NotRunning, match=f"is not trusted.*of user {me}"):
        Registry(tmp_path).spec()
    with pytest.raises(UntrustedFile):
        Registry(tmp_path).open(spec_of())


def test_a_link_in_the_place_of_a_file_is_not_followed(opened: Registry, tmp_path: Path) -> None:
    (tmp_path / "fleet" / "run.json").rename(tmp_path / "mine.json")
    (tmp_path / "fleet" / "run.json").symlink_to(tmp_path / "mine.json")
    with pytest.raises(NotRunning, match="symbolic link"):
        Registry(tmp_path).spec()


def test_a_file_of_another_release_names_the_remedy(opened: Registry, tmp_path: Path) -> None:
    opened.files.write("run.json", {"model": "base"})
    with pytest.raises(NotRunning, match="use the release of the run"):
        Registry(tmp_path).spec()


def test_every_claim_of_a_number_gets_another_one(opened: Registry) -> None:
    assert [Registry(opened.run).claim(1) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    "age", [lambda own: replace(own, started=1), lambda own: replace(own, pid=2**22 + 1)], ids=["pid again", "no pid"]
)
def test_a_killed_run_is_not_live(tmp_path: Path, age: Callable[[ProcessIdentity], ProcessIdentity]) -> None:
    registry = Registry(tmp_path)
    registry.open(spec_of(owner=age(ProcessIdentity())))
    with pytest.raises(NotRunning, match="its run has ended"):
        registry.spec()
    assert not registry.is_live(spec_of())


def test_a_zombie_process_has_ended() -> None:
    child = subprocess.Popen(["sleep", "600"])
    identity = ProcessIdentity(pid=child.pid, started=process_identity.started(child.pid))
    assert not identity.ended
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.ended
    child.wait()


def test_a_run_is_live_until_it_closes_its_registry_or_another_run_opens_it(opened: Registry) -> None:
    spec, seen = opened.spec(), Registry(opened.run)
    assert seen.is_live(spec)
    opened.open(spec_of(run_id="cd34"))
    assert not seen.is_live(spec)
    opened.close()
    assert not seen.is_live(spec) and not (opened.run / "fleet").exists()


def test_a_run_on_another_machine_has_ended_after_a_long_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    run, seen = Registry(tmp_path), Registry(tmp_path)
    run.open(spec_of(owner=ELSEWHERE))
    spec = seen.spec()
    for _ in range(100):
        now[0] += registry_module.SILENT_S / 4
        run.poll()
        assert seen.is_live(spec)
    now[0] += registry_module.SILENT_S * 1.1
    assert not seen.is_live(spec)


def test_on_another_machine_the_token_comes_from_the_environment_and_is_removed_from_it(
    opened: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRL_TOKEN", "brought along")
    assert opened.token(spec_of(owner=ELSEWHERE)) == "brought along"
    assert "LRL_TOKEN" not in os.environ, "what is started from here has it by another name, or not at all"
    monkeypatch.setattr(registry_module.getpass, "getpass", lambda prompt: f"typed after {prompt}")
    assert "lrl serve --chat" in opened.token(spec_of(owner=ELSEWHERE))


def test_without_a_keyboard_the_error_names_the_variable_of_the_token(
    opened: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_keyboard(prompt: str) -> str:
        raise EOFError

    monkeypatch.delenv("LRL_TOKEN", raising=False)
    for response in (no_keyboard, lambda prompt: ""):
        monkeypatch.setattr(registry_module.getpass, "getpass", response)
        with pytest.raises(NotRunning, match="put it in the variable LRL_TOKEN.*lrl serve --chat"):
            opened.token(spec_of(owner=ELSEWHERE))


def test_on_the_runs_machine_no_token_is_typed(opened: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRL_TOKEN", "of another run")
    with pytest.raises(NotRunning, match="none of them is running here"):
        opened.token(spec_of())


@pytest.mark.parametrize(
    ("spec", "own", "remedy"),
    [
        (spec_of("ipc"), OWN, "generator_devices above 0"),
        (spec_of("shared_memory", owner=ELSEWHERE), OWN, "weight_transfer: pull, or nccl"),
        (spec_of("pull", owner=ELSEWHERE), OWN, "strategy.server.host 127.0.0.1, which only its own machine reaches"),
        (spec_of("nccl", on_cpu=False), OWN, "--devices .not given.*are on GPUs"),
        (spec_of(), join.LocalOverrides([0], {}), "--devices 0: .*leave it out"),
        (spec_of("nccl", on_cpu=False, owner=ELSEWHERE), join.LocalOverrides([0], {}), "--host .not given"),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            join.LocalOverrides([0], {"host": "0.0.0.0"}),
            "--host 0.0.0.0",
        ),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            join.LocalOverrides([0], {"host": "10.0.0.7"}),
            "insecure: true",
        ),
    ],
)
def test_a_generator_that_cannot_join_is_an_error_before_its_start(
    spec: JoinSpec, own: join.LocalOverrides, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=remedy):
        join.settings_here(tmp_path, spec, own)


@pytest.mark.parametrize(
    ("of_run", "here", "named"),
    [
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, "NCCL_ALGO is 'Tree' here and is 'Ring' in"),
        ({}, {"NCCL_ALGO": "Tree"}, "NCCL_ALGO is 'Tree' here and is not set in"),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth1"}, None),
        ({"NCCL_ALGO": "Ring"}, {}, None),
    ],
)
def test_nccl_settings_that_contradict_the_runs_are_an_error_with_both_values(
    of_run: dict[str, str], here: dict[str, str], named: str | None, tmp_path: Path
) -> None:
    spec = spec_of("nccl", on_cpu=False, environment=of_run)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        join.check_environment(tmp_path, spec, here)


def test_settings_come_from_the_run_and_the_endpoint_from_this_machine(tmp_path: Path) -> None:
    asked = ServerSettings(max_model_len=77, dtype="float32", max_num_seqs=5, extra_args={"seed": 3})
    spec = replace(spec_of("nccl", on_cpu=False, owner=ELSEWHERE), settings=asdict(asked))
    found = join.settings_here(tmp_path, spec, join.LocalOverrides([0], {"host": "10.0.0.7", "insecure": True}))
    assert found == replace(asked, host="10.0.0.7", insecure=True)


def test_an_address_has_the_certificate_without_the_key_in_its_file(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(Path(key).read_text() + Path(certificate).read_text())
    address = Address("https://10.0.0.7:1", "certificate", first_certificate(str(both)))
    assert "PRIVATE KEY" not in address.certificate and address.context() is not None
