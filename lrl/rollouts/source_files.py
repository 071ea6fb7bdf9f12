"""Rows of a text file: JSON, CSV or plain lines, compressed or not.

Values are what the file says. A CSV file has no types, so all its values are text: whoever guesses
makes 7 of "007", and nothing of the answer "NA".
"""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow

from lrl.errors import ConfigError

Row = dict[str, Any]

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Ending of a compressed file, and Arrow's name of the format."""


def text_format(name: str) -> str:
    """Returns the ending of a text file's name, such as `.jsonl` for `a.jsonl.gz`; empty for other
    files."""
    path = Path(name.lower())
    inner = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return inner.suffix if inner.suffix in READERS else ""


def stem(name: str) -> str:
    """Returns a text file's name without its folder and its endings."""
    compressed = Path(name).suffix.lower() in COMPRESSIONS
    return Path(Path(name).stem).stem if compressed else Path(name).stem


def read_text_file(path: Path) -> list[Row]:
    """Returns the rows of a text file, in file order.

    Raises:
        ConfigError: The file cannot be read, or is not of its format.
    """
    try:
        with pyarrow.input_stream(str(path), COMPRESSIONS.get(path.suffix.lower())) as stream:
            text = stream.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give a readable file of UTF-8 text."
        ) from error
    return READERS[text_format(path.name)](path, text)


def _json_list(path: Path, text: str) -> list[Row]:
    if not text.lstrip().startswith("["):
        return _json_lines(path, text)
    try:
        rows: list[Row] = json.loads(text)
    except json.JSONDecodeError as error:
        raise _no_json(path, error.lineno, error) from error
    return rows


def _json_lines(path: Path, text: str) -> list[Row]:
    rows: list[Row] = []
    # Not splitlines(): a JSON string may hold other line ends, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise _no_json(path, number, error) from error
    return rows


def _no_json(path: Path, line: int, error: json.JSONDecodeError) -> ConfigError:
    return ConfigError(
        f"{path}, line {line}, column {error.colno}: {error.msg}. Give a list of objects, or one "
        "object in every line."
    )


def _comma_separated(path: Path, text: str) -> list[Row]:
    return _table(path, text, ",")


def _tab_separated(path: Path, text: str) -> list[Row]:
    return _table(path, text, "\t")


def _table(path: Path, text: str, delimiter: str) -> list[Row]:
    csv.field_size_limit(sys.maxsize)  # the module refuses fields of more than 128 KiB
    # newline="": a quoted field may hold line ends, and keeps them.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: list[str] = []
    rows: list[Row] = []
    try:
        for fields in lines:
            if not fields:
                continue
            if not columns:
                columns = fields
                _check_names(path, columns)
                continue
            if len(fields) != len(columns):
                raise ConfigError(
                    f"{path}, line {lines.line_num}: the row has {len(fields)} fields, and the "
                    f"first line names {len(columns)} columns. Put fields with {delimiter!r} or "
                    "line ends in them into quotes."
                )
            rows.append(dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {lines.line_num}: {error}. Mend the line.") from error
    return rows


def _check_names(path: Path, columns: list[str]) -> None:
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ConfigError(
            f"{path}: the first line names the column {twice[0]!r} twice. Rename one."
        )


def _plain_lines(path: Path, text: str) -> list[Row]:
    return [{"prompt": line.rstrip("\r")} for line in text.split("\n") if line.strip()]


READERS: dict[str, Callable[[Path, str], list[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _comma_separated,
    ".tsv": _tab_separated,
    ".txt": _plain_lines,
}
"""Reader of each format, by the ending of its files."""
