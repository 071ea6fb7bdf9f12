"""A generator that joins a run: a vLLM server whose trainer is this process."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.members.client import RunClient
from lrl.members.join_session import JoinSession, LocalOverrides, Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind
from lrl.system.endpoint import Location
from lrl.weights import find_transport


class JoiningGenerator(JoinSession):
    """See `JoinSession`."""

    kind = Kind.GENERATOR

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, overrides: LocalOverrides
    ) -> None:
        super().__init__(run, client, spec, overrides)
        self.settings = generator_settings(run, spec, overrides, client.location.url)
        self.folder = Path(f"join-{spec.run_id}" if "://" in run else run)
        """Where its log goes, and its model if the run gives it."""
        self.folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def serve(self) -> Iterator[Served]:
        with self._model() as model:
            server = self.make_server(model)
            try:
                self.say(f"starts, with the model {model}; its log is {server.log_path}")
                server.start()
                server.wait_ready(self.waiting)
                self.say(f"answers at {server.url}; waits for the run")
                yield Served(Location(**vars(server.location)), lambda: raise_if_ended(server))
            finally:
                server.stop()

    def make_server(self, model: str) -> Server:
        """Returns its server, not started."""
        spec, number = self.spec, self.number
        transport = find_transport(spec.transport)
        return Server(
            model,
            self.settings,
            backend=spec.transport,
            devices=self.overrides.devices,
            folder=self.folder,
            number=number,
            # Another run id: this supervisor must not remove the files in /dev/shm that belong to
            # the run itself.
            run_id=f"{spec.run_id}-joined-{number}",
            token=self.client.token,
            transport_environment=transport.server_environment(number, os.environ)
            | spec.environment,
            middleware=transport.middleware,
            seed=spec.seed,
        )

    @contextlib.contextmanager
    def _model(self) -> Iterator[str]:
        """The model: a name, a folder, or one that is fetched from the run and removed at the
        end."""
        if self.spec.owner.here or not self.spec.serves_model:
            yield self.spec.model
            return
        folder = self.folder / f"model-{self.number}"
        self.say(f"fetches the run's model, {self.spec.model}, into {folder}")
        try:
            ask(self.client, lambda: self.client.fetch_model(folder, self.waiting))
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def raise_if_ended(server: Server) -> None:
    """Raises ServerError, with the end of the log, if the server's process has ended."""
    if not server.alive:
        server.ready()


def generator_settings(
    run: str, spec: JoinSpec, overrides: LocalOverrides, url: str
) -> ServerSettings:
    """Returns the settings of a generator on this machine; raises ValueError if it cannot join.

    Args:
        run: The run, as its user gave it.
        spec: Its requirements.
        overrides: Settings that do not come from the run.
        url: The run's.
    """
    transport, here = find_transport(spec.transport), spec.owner.here
    if why := transport.join_refusal(here, spec.settings["host"]):
        raise ValueError(f"{run} {why}")
    check_environment(run, spec, os.environ)
    if spec.on_cpu == bool(overrides.devices):
        needed = (
            "are on the CPU: leave it out"
            if spec.on_cpu
            else "are on GPUs: give the indices of this one's"
        )
        devices = ",".join(map(str, overrides.devices)) or "(not given)"
        raise ValueError(f"--devices {devices}: the run's generators {needed}.")
    return spec.settings_here(overrides.endpoint, url)


def check_environment(run: str, spec: JoinSpec, variables: Mapping[str, str]) -> None:
    """Raises ValueError if a variable here contradicts the run's; one that is missing is no
    fault."""
    for name, here in find_transport(spec.transport).common_environment(variables).items():
        there = spec.environment.get(name)
        if here != there:
            of_run = "is not set" if there is None else f"is {there!r}"
            raise ValueError(
                f"{name} is {here!r} here and {of_run} in {run}: a transfer by {spec.transport} "
                f"hangs when its members disagree. Unset {name}; the generator then takes what the "
                "run has."
            )
