"""Small JSON files between processes of one user: written atomically, and trusted only if this user
owns file and folder, and their modes exclude all others. The check uses the open file, not its
name."""

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lrl.errors import UntrustedFile

T = TypeVar("T")


@dataclass
class OwnerOnlyFolder:
    """A folder of such files; it may not exist yet."""

    path: Path

    def make(self) -> None:
        """Makes or empties the folder; raises OSError if it cannot be this user's alone."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            self.path.chmod(0o700)
        self.clear()

    def clear(self) -> None:
        """Removes all files; raises OSError if one stays."""
        self.check()
        for file in self.path.iterdir():
            file.unlink(missing_ok=True)

    def read(self, name: str, kind: type[T]) -> T:
        """Returns a `kind` made of a file's fields; raises FileNotFoundError or UntrustedFile."""
        self.check()
        path = self.path / name
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            _check_owner(path, os.fstat(file.fileno()), stat.S_ISREG)
            try:
                return kind(**json.load(file))
            except (TypeError, ValueError) as error:
                raise UntrustedFile(
                    f"{path} is not what this release of lrl writes ({error}): use the release of "
                    "the run."
                ) from error

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Writes a file, or replaces it."""
        draft = self.path / f".{secrets.token_hex(8)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(fields, file)
        draft.rename(self.path / name)

    def check(self) -> None:
        """Raises UntrustedFile unless the folder is this user's alone."""
        _check_owner(self.path, self.path.lstat(), stat.S_ISDIR)


def _check_owner(path: Path, status: os.stat_result, is_kind: Any) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        kind = "folder" if is_kind is stat.S_ISDIR else "file"
        raise UntrustedFile(
            f"{path} is not trusted: it must be a {kind} of this user (id {os.geteuid()}), "
            f"closed to all others (mode 0700 or 0600); it is of user {status.st_uid}, with mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Remove it if you did not make it."
        )
