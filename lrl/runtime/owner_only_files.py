"""Small JSON files of one user's processes for each other: written whole, and believed only if nobody else can have.

A file is believed if this user owns it and it is closed to all others, and so is its folder. That is asked of the file
that is open, not of its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class NotBelieved(PermissionError):
    """Somebody else owns a file or may touch it, or it is not what it should be; the message names the remedy."""


class OwnerOnlyFolder:
    """A folder of such files.

    Args:
        path: Where; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder, or empty the one that is there; raises OSError if it cannot be this user's own."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            self.path.chmod(0o700)
        self.clear()

    def clear(self) -> None:
        """Remove all files; raises OSError if one stays."""
        self.check()
        for file in self.path.iterdir():
            file.unlink(missing_ok=True)

    def read(self, name: str, kind: type[T]) -> T:
        """The `kind` that the file holds the fields of.

        Raises:
            FileNotFoundError: There is no such file.
            NotBelieved: See there.
        """
        self.check()
        path = self.path / name
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            _believe(path, os.fstat(file.fileno()), stat.S_ISREG)
            try:
                return kind(**json.load(file))
            except (TypeError, ValueError) as error:
                raise NotBelieved(
                    f"{path} is not what this release of lrl writes ({error}): use the release of the run."
                ) from error

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Write a file, in the place of an older one if there is one."""
        self._draft(fields).rename(self.path / name)

    def write_new(self, name: str, fields: dict[str, Any]) -> bool:
        """Write a file unless it is there; of two processes that try, one has True."""
        draft = self._draft(fields)
        try:
            os.link(draft, self.path / name)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).exists()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()

    def numbers(self, pattern: str) -> list[int]:
        """The number, in ascending order, of each file whose name matches; the pattern's group is the number."""
        matches = (re.fullmatch(pattern, name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def check(self) -> None:
        """Raise NotBelieved unless the folder is this user's alone."""
        _believe(self.path, self.path.lstat(), stat.S_ISDIR)

    def _draft(self, fields: dict[str, Any]) -> Path:
        draft = self.path / f".{secrets.token_hex(8)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(fields, file)
        return draft


def _believe(path: Path, status: os.stat_result, is_kind: Any) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NotBelieved(
            f"{path} is not believed: it must be a {'folder' if is_kind is stat.S_ISDIR else 'file'} of this user "
            f"(id {os.geteuid()}), closed to all others (mode 0700 or 0600); it is of user {status.st_uid}, with mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Remove it if you did not make it."
        )
