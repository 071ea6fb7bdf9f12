"""Fetches a generator's files of weights, in vLLM's API server.

The files lie in shared memory, from which the workers load them. There is one at rest, the version
that the generator holds: the next delta needs it, and other generators may fetch it from here. A
file gets its name when its checksum is right, so a damaged one is never loaded. All is in the
names, because vLLM may run several API servers side by side.
"""

import http.client
import logging
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64

from lrl.errors import BadTransfer, DamagedDelta, FetchFailed
from lrl.system.auth import bearer
from lrl.system.endpoint import Location, connect
from lrl.weights.delta import apply_delta
from lrl.weights.fetch_order import FILES, FetchOrder, FetchReport, RemoteFile
from lrl.weights.staged_file import open_new, require_room

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""At one file: once at each source, and the rest at the last. All go on where the one before broke
off."""
BACKOFF_S = 0.5
"""Seconds before a second attempt at the same source; each further one waits so much longer."""
STALL_S = 10.0
"""Seconds without a byte that end an attempt."""
READ_BYTES = 2**20
"""Bytes that one read takes at most, so that the deadline is looked at often."""


class FetchedFiles:
    """The files of one generator.

    Args:
        folder: Where they lie, and nothing else; closed to other users.
        token: The run's token, for the sources.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token
        self._one_at_a_time = threading.Lock()
        self._newest: FetchOrder | None = None

    def find(self, name: str) -> Path | None:
        """Returns the path of a whole file or delta that is here; None if it is not."""
        path = self._folder / name
        return path if re.fullmatch(r"[\w-]+", name) and path.exists() else None

    def fetch(self, order: FetchOrder) -> FetchReport:
        """Makes the file of `order.whole` be here: by the delta where its base is here, else whole.

        An order that is still being carried out gives way to a new one.

        Raises:
            FetchFailed: It did not arrive, or not in time.
            OSError: There is no room for it.
        """
        end = time.monotonic() + order.deadline_s
        self._newest = order
        received = [0] * len(order.sources)
        with self._one_at_a_time:
            if (path := self.find(order.whole.name)) is not None:
                return FetchReport(str(path), "held", received)
            base = self.find(order.base)
            self._keep_only(order.base)
            if order.delta is not None and base is not None:
                delta = self._download(order, order.delta, end, received)
                if self._rebuild(base, delta, order.whole):
                    self._keep_only(order.whole.name, order.delta.name)
                    return FetchReport(str(self._folder / order.whole.name), "delta", received)
            self._keep_only()
            path = self._download(order, order.whole, end, received)
            return FetchReport(str(path), "whole", received)

    def _download(
        self, order: FetchOrder, file: RemoteFile, end: float, received: list[int]
    ) -> Path:
        """Fetches one file from the first source that has it; adds the fetched bytes to
        `received`."""
        require_room(self._folder, file.size)
        draft, path = self._draft(file.name), self._folder / file.name
        attempts = [*range(len(order.sources)), *[len(order.sources) - 1] * ATTEMPTS][:ATTEMPTS]
        failures: list[str] = []
        with open_new(draft) as out:
            download = Download(file, out)
            for number, source in enumerate(attempts):
                if number and source == attempts[number - 1]:
                    time.sleep(min(BACKOFF_S * number, max(0.0, end - time.monotonic())))
                before = download.total
                try:
                    self._receive(download, order, order.sources[source], end)
                    out.flush()
                    draft.rename(path)
                    return path
                except (OSError, http.client.HTTPException, BadTransfer) as error:
                    where = order.sources[source].url
                    failures.append(
                        f"{where} after {download.size} of {file.size} bytes: "
                        f"{error or type(error).__name__}"
                    )
                    if time.monotonic() > end or self._newest is not order:
                        break
                finally:
                    received[source] += download.total - before
        draft.unlink()
        raise FetchFailed(f"{file.name} could not be fetched. " + "; ".join(failures))

    def _receive(
        self, download: "Download", order: FetchOrder, source: Location, end: float
    ) -> None:
        headers = {"Authorization": bearer(self._token), **download.headers()}
        timeout_s = max(0.1, min(STALL_S, end - time.monotonic()))
        with closing(connect(source.url, source.context(), timeout_s)) as connection:
            connection.request("GET", FILES + download.file.name, headers=headers)
            response = connection.getresponse()
            download.begin(response)
            while chunk := response.read1(READ_BYTES):
                download.take(chunk)
                if time.monotonic() > end:
                    raise BadTransfer(f"the deadline of {order.deadline_s:.0f} s has passed")
                if self._newest is not order:
                    raise BadTransfer("the trainer has sent another order")
            download.end()

    def _rebuild(self, base: Path, delta: Path, whole: RemoteFile) -> bool:
        """Makes the whole file from its base; returns False if the result differs from the
        trainer's file."""
        require_room(self._folder, whole.size)
        draft = self._draft(whole.name)
        try:
            with open_new(draft) as out:
                found = apply_delta(base, delta, out)
        except DamagedDelta as error:
            log.warning("The whole weights are fetched: %s", error)
            return False
        if found != whole.checksum:
            log.warning(
                "The whole weights are fetched: %s makes the checksum %d of %s.", delta, found, base
            )
            return False
        draft.rename(self._folder / whole.name)
        return True

    def _keep_only(self, *names: str) -> None:
        """Removes all other files of this generator, drafts included."""
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _draft(self, name: str) -> Path:
        return self._folder / f"{name}.{os.getpid()}.draft"


class Download:
    """A file on its way: what has arrived of it, over all attempts."""

    def __init__(self, file: RemoteFile, out: BinaryIO) -> None:
        self.file = file
        self.size = 0
        """Bytes that are there."""
        self.total = 0
        """Received bytes, the discarded ones included."""
        self._out = out
        self._checksum = xxh3_64()

    def headers(self) -> dict[str, str]:
        """Returns the headers that ask for the rest."""
        return {"Range": f"bytes={self.size}-"} if self.size else {}

    def begin(self, response: http.client.HTTPResponse) -> None:
        """Takes the head of a response; raises BadTransfer if it does not announce the rest of the
        file."""
        if response.status not in (http.client.OK, http.client.PARTIAL_CONTENT):
            raise BadTransfer(
                f"it answered {response.status}: {response.read(200).decode(errors='replace')}"
            )
        if response.status == http.client.OK:  # the whole file, even if only the rest was asked for
            self._start_again()
        if response.length != self.file.size - self.size:
            raise BadTransfer(
                f"it announces {response.length} bytes, and {self.file.size - self.size} are "
                "missing"
            )

    def take(self, chunk: bytes) -> None:
        """Appends arrived bytes."""
        self._out.write(chunk)
        self._checksum.update(chunk)
        self.size += len(chunk)
        self.total += len(chunk)

    def end(self) -> None:
        """Raises BadTransfer unless the file is whole and undamaged; a damaged one starts again."""
        if self.size < self.file.size:
            raise BadTransfer("the connection ended")
        if (found := self._checksum.intdigest()) != self.file.checksum:
            self._start_again()
            raise BadTransfer(f"it has the checksum {found}, and {self.file.checksum} was staged")

    def _start_again(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        self.size = 0
        self._checksum.reset()
