"""Sources of a data set's rows: the hub, a file, a folder, a Python function or a Python list.

Rows from Python and from text files keep their values. `datasets` would turn a column of ISO dates
into datetimes, make 1 into 1.0 where another row has 2.5, and drop a column that the first row
lacks; rewards compare with such values. The hub, Parquet and saved folders have a schema, and
`datasets` reads them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lrl.errors import ConfigError
from lrl.rollouts.source_files import COMPRESSIONS, READERS, Row, read_text_file, stem, text_format
from lrl.system import hub
from lrl.system.import_by_name import function, is_name

FILES = (*READERS, ".parquet")
FORMS = (
    f"Give a hub name (owner/name), a file ({', '.join(FILES)}; text also as "
    f"{', '.join(COMPRESSIONS)}), a folder from datasets, or module:function."
)


class Known(NamedTuple):
    """Default subset, split and column of a data set."""

    source: str | list[Row]
    subset: str | None = None
    split: str = "train"
    prompt_column: str = "prompt"


KNOWN_SOURCES = {
    "gsm8k": Known("openai/gsm8k", subset="main", prompt_column="question"),
    "math": Known("DigitalLearningGmbH/MATH-lighteval", prompt_column="problem"),
    "math500": Known("HuggingFaceH4/MATH-500", split="test", prompt_column="problem"),
}


def known_source(source: str | list[Row]) -> Known:
    """Returns the defaults of `source`, a short name or a hub name; raises ConfigError for an
    object that has no rows."""
    kind = type(source).__name__
    has_rows = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if callable(source) or isinstance(source, Mapping) or kind == "DataFrame" or not has_rows:
        raise ConfigError(
            f"The prompts are of type {kind}: give rows, each a dict (a split of a DatasetDict, "
            'df.to_dict("records") of a DataFrame, what a function returns), or a text.\n' + FORMS
        )
    return next(
        (known for short, known in KNOWN_SOURCES.items() if source in (short, known.source)),
        Known(source),
    )


def short_name(source: str | list[Row]) -> str:
    """Returns the name of a source in metrics and logs: its short name, or the last part of its
    path."""
    if not isinstance(source, str):
        return "prompts"
    short = next(
        (short for short, known in KNOWN_SOURCES.items() if source == known.source), source
    )
    name = re.split(r"[/\\:]", short.rstrip("/"))[-1]
    return stem(name) if _is_file_name(name) else name


def read_rows(source: str | list[Row], subset: str | None, split: str) -> Iterable[Row]:
    """Returns the rows of a source as plain Python values, in file order.

    Raises:
        FileNotFoundError: `source` is a path that does not exist.
        ValueError: `source` cannot be read.
    """
    if not isinstance(source, str):
        return source
    path = Path(source).expanduser()
    if (_is_file_name(source) or source.startswith((".", "/", "~"))) and not path.exists():
        raise FileNotFoundError(
            f"There is no file or folder {source!r} (looked for {path.resolve()}).\n{FORMS}"
        )
    if text_format(path.name):
        return read_text_file(path)
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise ConfigError(f"The file {source!r} has none of the endings that lrl reads.\n{FORMS}")
    if is_name(source) and not path.exists():
        return _function_rows(source)
    try:
        return _dataset_rows(path, source, subset, split)
    except (
        OSError,
        ValueError,
        RuntimeError,
        DatasetsError,
    ) as error:
        # RuntimeError: it has a script.
        reason = " ".join(str(error.__cause__ or error).split())
        rows = f"{source!r}, subset {subset!r}, split {split!r}"
        raise ConfigError(f"The data set {rows} cannot be read: {reason:.300}\n{FORMS}") from None


def _is_file_name(name: str) -> bool:
    return bool(text_format(name)) or name.lower().endswith(".parquet")


def _function_rows(source: str) -> Iterator[Row]:
    try:
        rows_of = function(source)
    except ValueError as error:
        raise ConfigError(f"The source {source!r}: {error}") from error
    try:
        if isinstance(rows := rows_of(), Iterable):
            yield from rows
            return
    except Exception as error:
        raise ConfigError(
            f"The source {source!r} raised {type(error).__name__}: {error}. Mend the function."
        ) from error
    raise ConfigError(
        f"The source {source!r} returned {rows!r:.80}; it has to return rows, each a dict."
    )


def _dataset_rows(path: Path, source: str, subset: str | None, split: str) -> Iterable[Row]:
    if path.suffix.lower() == ".parquet":
        return Dataset.from_parquet(str(path))
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict) and split not in saved:
            raise ConfigError(f"The folder has the splits {', '.join(saved)}.")
        return saved[split] if isinstance(saved, DatasetDict) else saved
    if not path.exists():
        hub.reach()
    return load_dataset(source, subset, split=split)
