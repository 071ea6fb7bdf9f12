"""Rows of a data set, from every form of file and from a function."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest

from lrl.errors import ConfigError
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.sources import known_source, read_rows

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


def lines(path: Path) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS) + "\n", encoding="utf-8"
    )
    return path


def listed(path: Path) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def parquet(path: Path) -> Path:
    path = path.with_suffix(".parquet")
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    return path


def saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def saved_splits(path: Path) -> Path:
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(path)
    return path


def table(path: Path, ending: str = ".csv", delimiter: str = ",") -> Path:
    path = path.with_suffix(ending)
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # as spreadsheets write it
        writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def tabs(path: Path) -> Path:
    return table(path, ".TSV", "\t")


def compressed(write: Callable[[Path], Path], ending: str, codec: str) -> Callable[[Path], Path]:
    def write_compressed(path: Path) -> Path:
        plain = write(path)
        target = plain.with_name(plain.name + ending)
        with pyarrow.output_stream(str(target), codec) as stream:
            stream.write(plain.read_bytes())
        plain.unlink()
        return target

    return write_compressed


COMPRESSED = [
    compressed(lines, ".gz", "gzip"),
    compressed(listed, ".zst", "zstd"),
    compressed(table, ".bz2", "bz2"),
]


@pytest.mark.parametrize(
    "write", [lines, listed, table, tabs, *COMPRESSED, parquet, saved, saved_splits]
)
def test_rows_come_back_as_they_were_written(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert list(read_rows(str(write(tmp_path / "rows")), None, "test")) == ROWS


def test_rows_come_from_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "made_up_rows.py").write_text("def rows():\n    yield {'prompt': '1+1?'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(read_rows("made_up_rows:rows", None, "train")) == [{"prompt": "1+1?"}]
    with pytest.raises(ValueError, match="made_up_rows.* has no .missing."):
        list(read_rows("made_up_rows:missing", None, "train"))


def test_a_hub_name_that_cannot_be_read_says_why_in_a_few_lines() -> None:
    with pytest.raises(ValueError, match="'nobody/nothing'.*cannot be read: .*Hub") as caught:
        read_rows("nobody/nothing", "main", "train")
    assert len(str(caught.value).splitlines()) <= 10 and caught.value.__suppress_context__


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
        ("rows.csv", "prompt,answer\na, b,2\n", "line 2: 3 fields"),
        ("rows.csv", 'prompt,answer\n"a"b,2\n', "line 2: .*expected after"),
        ("rows.csv", 'prompt,answer\na,"2\nb,3\n', "line 3: unexpected end"),
        ("rows.csv", "prompt,prompt\na,2\n", "line 2: .*prompt, prompt"),
        ("rows.jsonl", '{"prompt": "x"}\n\nnot json\n', "line 3, column 1"),
        ("rows.jsonl.gz", "{}", "header"),
        ("rows.xlsx", "PK", r"(?s:.*)Give .*\.csv"),
        ("rows.gz", "{}", r"(?s:.*)Give .*\.gz"),
        ("rows", "{}", "(?s:.*)Give a hub name"),
        ("rows.json", "[{]", "line 1 column 3"),
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


def test_a_file_that_is_cut_is_not_read_in_part(tmp_path: Path) -> None:
    for write in COMPRESSED:
        path = write(tmp_path / "rows")
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match="cannot be read: Truncated"):
            read_rows(str(path), None, "train")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("a/Data-v1.5/", "Data-v1.5"),
        ("x/y.jsonl", "y"),
        ("x/y-v1.5.csv.gz", "y-v1.5"),
        ("m.n:rows", "rows"),
    ],
)
def test_metrics_get_a_short_name(source: str, name: str) -> None:
    assert known_source(source).name == name
    assert known_source([]).name == "prompts"


def test_nested_columns_are_plain_python(tmp_path: Path) -> None:
    """As in the files of verl, where a reward function looks into them."""
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([row]).to_parquet(path)
    assert list(read_rows(str(path), None, "train")) == [row]


@pytest.mark.parametrize(
    "given",
    [
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        {"prompt": ["a"]},
        pandas.DataFrame(ROWS),
    ],
)
def test_what_has_columns_and_no_rows_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="Row 0 of prompts is '(train|prompt)', not a dict"):
        Prompts(given).read()


@pytest.mark.parametrize("form", [list, tuple, iter, datasets.Dataset.from_list])
def test_rows_of_python_are_taken_in_any_form(form: Any) -> None:
    prompts = Prompts(form(ROWS))
    prompts.read()
    assert prompts.rows == ROWS
