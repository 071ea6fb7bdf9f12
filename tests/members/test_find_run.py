"""The trust between a run and a process that joins: whose file it is, whose process, and who has
the token."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lrl.checkpoints.run_folder import OwnerOnlyFolder
from lrl.environments import Agent
from lrl.environments.external_agents import ExternalAgents
from lrl.errors import ConfigError, NotRunning, UntrustedFile
from lrl.members.find_run import find_run
from lrl.members.registry import RegistryServer, RunFile, remove_run_file, write_run_file
from lrl.strategies.generator_devices import AsyncSingleDevice
from lrl.system import processes
from lrl.system.processes import ProcessIdentity
from tests.certificates import self_signed
from tests.members.served_run import TOKEN, served, spec_of

ELSEWHERE = ProcessIdentity(machine="another one", pid=1, started=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RegistryServer]:
    with served(spec_of(), tmp_path) as found:
        yield found


def rewrite(folder: Path, **fields: object) -> None:
    files = OwnerOnlyFolder(folder / "fleet")
    files.write("run.json", asdict(replace(files.read("run.json", RunFile), **fields)))  # type: ignore[arg-type]


def test_the_file_is_closed_to_all_others_and_has_no_token(
    server: RegistryServer, tmp_path: Path
) -> None:
    assert (tmp_path / "fleet").stat().st_mode & 0o777 == 0o700
    (path,) = (tmp_path / "fleet").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and TOKEN not in path.read_text()
    remove_run_file(tmp_path)
    assert not (tmp_path / "fleet").exists()


def with_a_link(fleet: Path) -> None:
    (fleet / "run.json").rename(fleet / "mine.json")
    (fleet / "run.json").symlink_to(fleet / "mine.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda fleet: (fleet / "run.json").chmod(0o622), "run.json is not trusted.*0622"),
        (lambda fleet: (fleet / "run.json").chmod(0o640), "run.json is not trusted.*0640"),
        (lambda fleet: (fleet / "run.json").chmod(0o604), "run.json is not trusted.*0604"),
        (lambda fleet: fleet.chmod(0o777), "fleet is not trusted.*0777"),
        (with_a_link, "symbolic link"),
        (
            lambda fleet: OwnerOnlyFolder(fleet).write("run.json", {"model": "base"}),
            "use the release of the run",
        ),
    ],
)
def test_a_file_that_others_could_have_written_is_not_trusted(
    server: RegistryServer, tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    change(tmp_path / "fleet")
    with pytest.raises(NotRunning, match=why):
        find_run(str(tmp_path))


def test_another_users_file_is_not_trusted(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(NotRunning, match=f"is not trusted.*of user {me}"):
        find_run(str(tmp_path))
    with pytest.raises(UntrustedFile):
        write_run_file(tmp_path, server)


@pytest.mark.parametrize("another", [{"started": 1}, {"pid": 2**22 + 1}])
def test_a_killed_run_is_not_live(
    server: RegistryServer, tmp_path: Path, another: dict[str, int]
) -> None:
    rewrite(tmp_path, owner=replace(ProcessIdentity(), **another))
    with pytest.raises(NotRunning, match="its run has ended"):
        find_run(str(tmp_path))


def test_a_zombie_process_has_ended() -> None:
    child = subprocess.Popen(["sleep", "600"])
    identity = ProcessIdentity(pid=child.pid, started=processes.started(child.pid))
    assert not identity.ended
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.ended
    child.wait()


def test_on_another_machine_the_token_comes_from_the_environment_and_is_removed_from_it(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(tmp_path, owner=ELSEWHERE)
    for run in (str(tmp_path), server.location().url):
        monkeypatch.setenv("LRL_TOKEN", TOKEN)
        assert find_run(run).spec() == spec_of()
        assert "LRL_TOKEN" not in os.environ, "or what is started from here had it"
    rewrite(tmp_path, owner=ELSEWHERE, elsewhere="http://10.0.0.7:5")
    monkeypatch.setattr("getpass.getpass", lambda prompt: f"typed after {prompt}")
    found = find_run(str(tmp_path))
    assert "lrl prompt" in found.token and found.location.url == "http://10.0.0.7:5"
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")  # or EOFError, of a job
    with pytest.raises(NotRunning, match="put it in the variable LRL_TOKEN.*lrl prompt"):
        find_run(str(tmp_path))


def test_on_the_runs_machine_no_token_is_typed(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LRL_TOKEN", raising=False)
    with pytest.raises(NotRunning, match="none of its generators"):
        find_run(str(tmp_path))
    # A run whose generators are all elsewhere was started with it.
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    assert find_run(str(tmp_path)).spec() == spec_of()


@pytest.mark.parametrize(
    ("variable", "secret"),
    [
        ("LRL_TOKEN", lambda: AsyncSingleDevice().token),
        ("LRL_AGENT_KEY", lambda: ExternalAgents(Agent(port=0), 1.0)._key),
    ],
)
def test_a_run_takes_the_secret_that_it_is_started_with_and_none_that_is_easily_guessed(
    variable: str, secret: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, TOKEN)
    assert secret() == TOKEN and variable not in os.environ
    assert len(secret()) > 40 and secret() != secret()
    monkeypatch.setenv(variable, "1234")
    with pytest.raises(ConfigError, match=f"{variable} has 4 characters.*openssl rand -hex 32"):
        secret()


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_the_certificate_of_a_url_is_the_only_one_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    certificate, key = self_signed(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(Path(key).read_text() + Path(certificate).read_text())
    found = find_run(f"{scheme}://10.0.0.7:5", str(both)).location
    assert found.certificate and "PRIVATE KEY" not in found.certificate
    assert found.context() is not None


def test_a_run_that_listens_everywhere_is_joined_where_its_ranks_meet(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.endpoint = replace(server.endpoint, host="0.0.0.0")
    for meeting, seen in (("10.0.0.7", "10.0.0.7"), ("127.0.0.1", socket.gethostname())):
        monkeypatch.setenv("MASTER_ADDR", meeting)
        assert server.elsewhere.url.startswith(f"http://{seen}:")
