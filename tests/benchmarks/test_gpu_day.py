"""A GPU's quarter of an hour asks what has no answer yet, and keeps what a failed item has found."""

from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.gpu.day import ITEMS, Item, ask, pending
from benchmarks.gpu.step_profile import kinds

NAMES = [item.name for item in ITEMS]


def ended(name: str, answered: bool) -> dict[str, Any]:
    return {"item": name, "answered": answered}


def test_items_have_a_name_each_and_need_no_vllm_before_those_that_do() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert sorted(ITEMS, key=lambda item: item.vllm) == list(ITEMS)


def test_what_is_answered_is_not_asked_again_and_what_failed_is_asked_last() -> None:
    first, second, *others = NAMES
    found = pending([ended(first, answered=False), ended(second, answered=True)], with_vllm=True)
    assert [item.name for item in found] == [*others, first]


def test_a_result_of_an_item_is_no_answer() -> None:
    row = {"item": NAMES[0], "row": "result"}
    assert pending([row], with_vllm=True)[0].name == NAMES[0]


def test_without_vllm_the_others_are_asked() -> None:
    assert all(not item.vllm for item in pending([], with_vllm=False))


def test_an_item_that_fails_keeps_its_results_and_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_item.py").write_text(
        "import sys\n"
        'open(sys.argv[1], \'w\').write(\'{"row": "a", "ms": 3}\\n\')\n'
        "print('out of memory')\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = Namespace(folder=tmp_path, out=tmp_path / "out.jsonl", rehearse=False)
    item = Item("one", "one_item OUT", 300, "one_item OUT")
    assert not ask(item, item.limit_s, args)
    row, end = records.read(args.out)
    assert (row["item"], row["row"], row["ms"]) == ("one", "a", 3)
    assert (end["answered"], end["status"]) == (False, 3)
    assert "out of memory" in end["output"]


def test_kinds_of_kernels_add_up_to_the_whole() -> None:
    micros = Counter(
        {
            "nvjet_tst_128x256": 5000,
            "void at::native::multi_tensor_apply_kernel<AdamW>": 2000,
            "void at::native::vectorized_elementwise_kernel<direct_copy_kernel_cuda>": 1500,
            "something new": 1000,
        }
    )
    found = kinds(micros)
    assert found == {"matrices": 5.0, "optimizer": 2.0, "copies": 1.5, "other": 1.0}
