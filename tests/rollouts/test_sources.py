"""Rows of a data set, from every form of file and from a function."""

import re
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest

from lrl.errors import ConfigError
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.sources import read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "When\u2028was it?", "answer": "2024-01-01"},
    {"prompt": "Ü?", "answer": "2024-01-02"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the tests from the user's cache and from the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def write(path: Path) -> Path:
    """Writes the rows in the form that the name of the file, or of a folder, says."""
    frame, name = pandas.DataFrame(ROWS), path.name.lower()
    if codec := CODECS.get(path.suffix):
        plain = write(path.with_suffix(""))
        with pyarrow.output_stream(str(path), codec) as stream:
            stream.write(plain.read_bytes())
    elif ".json" in name:
        frame.to_json(path, orient="records", lines=name.endswith("l"), force_ascii=False)
    elif ".parquet" in name:
        frame.to_parquet(path)
    elif name.endswith("sv"):
        separator = "\t" if name.endswith(".tsv") else ","
        frame.to_csv(path, sep=separator, index=False, encoding="utf-8-sig")  # as spreadsheets do
    else:
        rows = datasets.Dataset.from_list(ROWS)
        (datasets.DatasetDict(test=rows) if name == "splits" else rows).save_to_disk(path)
    return path


COMPRESSED = ["rows.jsonl.gz", "rows.json.zst", "rows.csv.bz2"]


@pytest.mark.parametrize(
    "name",
    ["rows.jsonl", "rows.json", "rows.csv", "rows.TSV", *COMPRESSED, "rows.parquet"]
    + ["saved", "splits"],
)
def test_rows_come_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    assert list(read_rows(str(write(tmp_path / name)), None, "test")) == ROWS


def test_rows_come_from_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "made_up_rows.py").write_text("def rows():\n    yield {'prompt': '1+1?'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(read_rows("made_up_rows:rows", None, "train")) == [{"prompt": "1+1?"}]
    with pytest.raises(ValueError, match="made_up_rows.* has no .missing."):
        list(read_rows("made_up_rows:missing", None, "train"))


def test_a_csv_file_says_its_values_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer,hint\n"a, b\n""c""",007,NA\n\n2+2=,4.0,\n')
    assert list(read_rows(str(path), None, "train")) == [
        {"prompt": 'a, b\n"c"', "answer": "007", "hint": "NA"},
        {"prompt": "2+2=", "answer": "4.0", "hint": ""},
    ]


def test_a_line_of_a_plain_text_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"2+2=\r\n\r\n 3+3= \n")
    assert list(read_rows(str(path), None, "train")) == [{"prompt": "2+2="}, {"prompt": " 3+3= "}]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.csv", "prompt,answer\n1+1=,2\n2+2=\n", "line 3: 1 fields"),
        ("rows.csv", 'prompt,answer\na,"2\nb,3\n', "line 3: unexpected end"),
        ("rows.csv", "prompt,prompt\na,2\n", "line 1: .*prompt, prompt"),
        ("rows.jsonl", '{"prompt": "x"}\n\nnot json\n', "line 3, column 1"),
        ("rows.jsonl.gz", "{}", "header"),
        ("rows.parquet", "{}", "Parquet"),
        ("rows.txt", b"\xe9", "utf-8"),
        ("no/rows.jsonl", None, "No such file(?s:.*)Give a hub name"),
    ],
)
def test_a_file_that_cannot_be_read_whole_says_why(
    name: str, content: str | bytes | None, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}'.* cannot be read: .*{text}"):
        list(read_rows(str(path), None, "train"))


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_file_that_is_cut_is_not_read_in_part(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read: Truncated"):
        read_rows(str(path), None, "train")


def test_what_has_columns_and_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="Row 0 of prompts is 'prompt', not a dict"):
        Prompts(pandas.DataFrame(ROWS)).read()  # type: ignore[arg-type]
