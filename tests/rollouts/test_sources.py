import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from lrl.rollouts.sources import read_rows, short_name

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
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS) + "\n", encoding="utf-8")
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


@pytest.mark.parametrize("write", [lines, listed, parquet, saved, saved_splits])
def test_rows_come_back_as_they_were_written(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert list(read_rows(str(write(tmp_path / "rows")), None, "test")) == ROWS


def test_rows_come_from_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "made_up_rows.py").write_text("def rows():\n    yield {'prompt': '1+1?'}\n\ndef none():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(read_rows("made_up_rows:rows", None, "train")) == [{"prompt": "1+1?"}]
    with pytest.raises(ValueError, match="made_up_rows:none' returned None"):
        list(read_rows("made_up_rows:none", None, "train"))
    with pytest.raises(ValueError, match="made_up_rows has no .missing."):
        list(read_rows("made_up_rows:missing", None, "train"))


def test_a_missing_file_is_named_with_the_forms_there_are() -> None:
    with pytest.raises(FileNotFoundError, match="'nowhere/rows.jsonl'(?s:.*)Give a hub name"):
        read_rows("nowhere/rows.jsonl", None, "train")
    with pytest.raises(FileNotFoundError, match="'./nowhere'"):
        read_rows("./nowhere", None, "train")


def test_a_hub_name_that_cannot_be_read_says_why_in_a_few_lines() -> None:
    with pytest.raises(ValueError, match="'nobody/nothing'.*cannot be read: .*Hub") as caught:
        read_rows("nobody/nothing", "main", "train")
    assert len(str(caught.value).splitlines()) <= 10 and caught.value.__suppress_context__


def test_a_missing_split_is_an_error_with_the_known_splits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split 'train'.*has the splits test"):
        read_rows(str(saved_splits(tmp_path / "rows")), None, "train")


def test_a_line_that_is_not_json_is_found_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n\nnot json\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3, column 1"):
        read_rows(str(path), None, "train")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("a/Data-v1.5/", "Data-v1.5"),
        ("x/y.jsonl", "y"),
        ("m.n:rows", "rows"),
    ],
)
def test_metrics_get_a_short_name(source: str, name: str) -> None:
    assert short_name(source) == name
    assert short_name([]) == "prompts"
