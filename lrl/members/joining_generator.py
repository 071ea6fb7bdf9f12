"""A generator that joins a run: a vLLM server under a supervisor, like the run's own, with this process as trainer."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lrl.generators.endpoint import Location
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.members.client import RunClient
from lrl.members.join_session import Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member
from lrl.weights import find_transport


class JoiningGenerator:
    """See `lrl.members.join_session.Joining`.

    Args:
        run: The run, as its user gave it.
        client: The run.
        spec: Its requirements.
        devices: CUDA indices; empty on a CPU.
        endpoint: The fields of `Endpoint` that were given for this machine.

    Raises:
        ValueError: A generator on this machine cannot meet the requirements.
    """

    kind = Kind.GENERATOR
    workers = 0

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, devices: list[int], endpoint: dict[str, Any]
    ) -> None:
        self.client, self.spec, self.devices = client, spec, devices
        self.settings = generator_settings(run, spec, devices, endpoint, client.location.url)
        self.folder = Path(f"join-{spec.run_id}" if "://" in run else run)
        """Where its log goes, and its model if the run gives it."""
        self.folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def served(self, number: int, say: Callable[[str], None], waiting: Callable[[], None]) -> Iterator[Served]:
        """See `Joining.served`."""
        with self._model(number, say, waiting) as model:
            server = self.make_server(number, model)
            try:
                say(f"starts, with the model {model}; its log is {server.log_path}")
                server.start()
                server.wait_ready(waiting)
                say(f"answers at {server.url}; waits for the run")
                yield Served(Location(**vars(server.location)), lambda: raise_if_ended(server))
            finally:
                server.stop()

    def how(self, member: Member) -> str:
        """See `Joining.how`."""
        return f"since version {member.version}"

    def make_server(self, number: int, model: str) -> Server:
        """Returns its server, not started."""
        spec, transport = self.spec, find_transport(self.spec.transport)
        return Server(
            model,
            self.settings,
            backend=spec.transport,
            devices=self.devices,
            folder=self.folder,
            number=number,
            # Another run id: this supervisor must not remove the files in /dev/shm that belong to the run itself.
            run_id=f"{spec.run_id}-joined-{number}",
            token=self.client.token,
            transport_environment=transport.server_environment(number, os.environ) | spec.environment,
            middleware=transport.middleware,
            seed=spec.seed,
        )

    @contextlib.contextmanager
    def _model(self, number: int, say: Callable[[str], None], waiting: Callable[[], None]) -> Iterator[str]:
        """The model: a name, a folder of this machine, or one that is fetched from the run and removed at the end."""
        if self.spec.owner.here or not self.spec.serves_model:
            yield self.spec.model
            return
        folder = self.folder / f"model-{number}"
        say(f"fetches the run's model, {self.spec.model}, into {folder}")
        try:
            ask(self.client, lambda: self.client.fetch_model(folder, waiting))
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def raise_if_ended(server: Server) -> None:
    """Raises ServerError, with the end of the log, if the server's process has ended."""
    if not server.alive:
        server.ready()


def generator_settings(
    run: str, spec: JoinSpec, devices: list[int], endpoint: dict[str, Any], url: str
) -> ServerSettings:
    """Returns the settings of a generator on this machine; raises ValueError if it cannot join.

    Args:
        run: The run, as its user gave it.
        spec: Its requirements.
        devices: CUDA indices; empty on a CPU.
        endpoint: The fields of `Endpoint` that were given for this machine.
        url: The run's.
    """
    transport, here = find_transport(spec.transport), spec.owner.here
    if why := transport.join_refusal(here) or ("" if here else transport.address_refusal(spec.settings["host"])):
        raise ValueError(f"{run} {why}")
    check_environment(run, spec, os.environ)
    if spec.on_cpu == bool(devices):
        needed = "are on the CPU: leave it out" if spec.on_cpu else "are on GPUs: give the indices of this one's"
        given = ",".join(map(str, devices)) or "(not given)"
        raise ValueError(f"--devices {given}: the run's generators {needed}.")
    return spec.settings_here(endpoint, url)


def check_environment(run: str, spec: JoinSpec, own: Mapping[str, str]) -> None:
    """Raises ValueError if a variable here contradicts the run's; what is only missing here is set for the server."""
    for name, here in find_transport(spec.transport).common_environment(own).items():
        there = spec.environment.get(name)
        if here != there:
            of_run = "is not set" if there is None else f"is {there!r}"
            raise ValueError(
                f"{name} is {here!r} here and {of_run} in {run}: a transfer by {spec.transport} hangs when its members "
                f"disagree. Unset {name}; the generator then takes what the run has."
            )
