"""Sources of a data set's rows: the hub, a file, a folder, a Python function or a Python list.

Rows from Python and from text files keep their values: `datasets` would turn ISO dates into
datetimes and 1 into 1.0, drop a column that the first row lacks, and shift the columns of long CSV
lines. The hub, Parquet and saved folders have a schema, and `datasets` reads them.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lrl.errors import ConfigError
from lrl.system import hub
from lrl.system.imports import function, is_name

Row = dict[str, Any]

FORMS = (
    "Give a hub name (owner/name), a file (.jsonl, .json, .csv, .tsv, .txt, .parquet; text also as "
    ".gz, .zst, .bz2), a folder from datasets, or module:function."
)
_FILE = re.compile(r"\.((?P<text>jsonl|json|csv|tsv|txt)(\.(gz|zst|bz2))?|parquet)$", re.IGNORECASE)


class Known(NamedTuple):
    """A data set's name in metrics and logs, and its default subset, split and column."""

    name: str
    source: str | list[Row]
    subset: str | None = None
    split: str = "train"
    prompt_column: str = "prompt"


KNOWN_SOURCES = (
    Known("gsm8k", "openai/gsm8k", subset="main", prompt_column="question"),
    Known("math", "DigitalLearningGmbH/MATH-lighteval", prompt_column="problem"),
    Known("math500", "HuggingFaceH4/MATH-500", split="test", prompt_column="problem"),
)


def known_source(source: str | list[Row]) -> Known:
    if not isinstance(source, str):
        return Known("prompts", source)
    for known in KNOWN_SOURCES:
        if source in (known.name, known.source):
            return known
    return Known(_FILE.sub("", re.split(r"[/\\:]", source.rstrip("/"))[-1]), source)


def read_rows(source: str | list[Row], subset: str | None, split: str) -> Iterable[Row]:
    """Returns the rows of a source as plain Python values, in file order; raises ValueError if it
    cannot be read."""
    if not isinstance(source, str):
        return source
    path = Path(source).expanduser()
    if is_name(source) and not path.exists():
        rows: Iterable[Row] = function(source)()
        return rows
    ending = _FILE.search(source)
    try:
        if ending and ending["text"]:
            return _text_rows(path, ending["text"].lower())
        return _dataset_rows(path, source, subset, split)
    # RuntimeError: the data set has a script. KeyError: the saved folder has other splits.
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        rows_of = f"{source!r}, subset {subset!r}, split {split!r}"
        raise ConfigError(
            f"The data set {rows_of} cannot be read: {reason:.300}\n{FORMS}"
        ) from None


def _text_rows(path: Path, ending: str) -> list[Row]:
    with pyarrow.input_stream(str(path)) as stream:  # decompresses by the file's ending
        text = stream.read().decode("utf-8-sig")
    if ending in ("csv", "tsv"):
        return _table(text, "," if ending == "csv" else "\t")
    # Not splitlines(): a JSON string may hold other line ends, such as U+2028.
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if ending == "txt":
        return [{"prompt": line.rstrip("\r")} for _, line in lines]
    if ending == "json" and text.lstrip().startswith("["):
        rows: list[Row] = json.loads(text)
        return rows
    rows = []
    for at, line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {at}, column {error.colno}: {error.msg}") from None
    return rows


def _table(text: str, delimiter: str) -> list[Row]:
    """Returns the rows of a CSV file, all values as text: guessing types turns "007" into 7 and the
    answer "NA" into nothing."""
    csv.field_size_limit(sys.maxsize)  # the module refuses fields of more than 128 KiB
    # newline="": a quoted field may hold line ends, and keeps them.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    try:
        for fields in filter(None, lines):
            names = rows[0] if rows else fields
            if len(fields) != len(set(names)):
                raise csv.Error(f"{len(fields)} fields for the columns {', '.join(names)}")
            rows.append(fields)
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from None
    return [dict(zip(rows[0], fields, strict=True)) for fields in rows[1:]]


def _dataset_rows(path: Path, source: str, subset: str | None, split: str) -> Iterable[Row]:
    if path.suffix.lower() == ".parquet":
        return Dataset.from_parquet(str(path))
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = load_from_disk(str(path))
        return saved[split] if isinstance(saved, DatasetDict) else saved
    if not path.exists():
        hub.reach()
    return load_dataset(source, subset, split=split)
