"""`lrl ray` before it goes to Ray: what it derives from the settings, what it refuses; the manifest
for Kubernetes.

Covers lrl/cli/ray_request.py.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import lrl
from lrl.cli.main import main
from lrl.cli.ray_request import RayRequest

pytest.importorskip("ray")
from lrl.cli import ray_run  # noqa: E402

MANIFEST = Path(lrl.__file__).parent / "recipes" / "cluster" / "rayjob.yaml"
DDP = ["--trainer.strategy.class_path", "lrl.AsyncDDP"]
ON_GPUS = ["--trainer.accelerator", "gpu", "--trainer.devices", "8"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], RayRequest]]:
    """What would have gone to Ray."""
    found: list[tuple[list[str], RayRequest]] = []

    def run(words: Sequence[str], asked: RayRequest) -> int:
        found.append(([*words], asked))
        return 0

    monkeypatch.setattr(ray_run, "run", run)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["ray", *words])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_the_number_of_nodes_and_the_gpus_of_each_need_not_be_said_twice(asked: list[Any]) -> None:
    words = ["fit", "--config", "quickstart", *DDP]
    assert (
        main(["ray", "--nodes", "3", "--cpus", "4", "--resources", '{"h100": 1}', *words, *ON_GPUS])
        == 0
    )
    assert main(["ray", "--nodes", "3", *words, "--trainer.num_nodes", "3"]) == 0
    (gpu, on_gpus), (cpu, on_cpu) = asked
    assert gpu == [*words, *ON_GPUS, "--trainer.num_nodes", "3"] and cpu[-2:] == [
        "--trainer.num_nodes",
        "3",
    ]
    assert on_gpus.bundle == {"CPU": 4.0, "GPU": 8.0, "h100": 1.0} and on_gpus.nodes == 3
    assert on_cpu.bundle == {"CPU": 1.0}


def test_the_shipped_recipe_for_several_nodes_is_asked_for_as_it_is(asked: list[Any]) -> None:
    recipe = MANIFEST.with_name("llama_70b_four_nodes.yaml")
    assert main(["ray", "--nodes", "3", "fit", "--config", str(recipe)]) == 0
    assert asked[0][1].bundle == {"CPU": 1.0, "GPU": 8.0}


def test_a_strategy_of_one_device_may_run_on_one_node(asked: list[Any]) -> None:
    assert main(["ray", "--nodes", "1", "fit", "--config", "quickstart"]) == 0
    assert asked[0][1].nodes == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            [*DDP, "--trainer.num_nodes", "4"],
            "trainer.num_nodes is 4 and --nodes is 2: leave trainer.num_nodes out",
        ),
        (
            [],
            "trainer.strategy is lrl.AsyncSingleDevice, which trains on one node, and --nodes is "
            "2: take lrl.AsyncDDP",
        ),
        (
            [*DDP, "--trainer.accelerator", "gpu", "--trainer.devices", "auto"],
            "trainer.devices is 'auto'",
        ),
        (
            [*DDP, "--trainer.max_stepss", "4"],
            "--trainer.max_stepss: there is no such setting. Did you mean",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_placed(
    asked: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert reason in refused(capsys, "--nodes", "2", "fit", "--config", "quickstart", *words)
    assert asked == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["fit"], "--nodes"),
        (["--nodes", "0", "fit"], "ray.nodes is 0; it must be above 0"),
        (["--nodes", "2"], "there is no fit and no validate"),
        (
            ["--nodes", "2", "--resources", "h100", "fit"],
            "Got value: h100",
        ),
        (["--nodes", "2", "--gpus", "-1", "fit"], "ray.gpus is -1; it must be at least 0"),
        (["--nodes", "2", "fit", "--config", "quickstrat"], "Did you mean quickstart?"),
    ],
)
def test_a_wrong_word_is_named(
    asked: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert reason in refused(capsys, *words)
    assert asked == []


def test_without_ray_it_says_what_to_install(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("lrl.cli.ray.find_spec", lambda name: None if name == "ray" else find(name))
    assert "pip install 'lrl[ray]'" in refused(
        capsys, "--nodes", "2", "fit", "--config", "quickstart", *DDP
    )


def test_without_a_cluster_it_says_where_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lrl"])
    words = [
        "ray",
        "--nodes",
        "2",
        "--address",
        "127.0.0.1:9",
        "fit",
        "--config",
        "quickstart",
        *DDP,
    ]
    assert main(words) == 1
    assert "--address is 127.0.0.1:9, and no Ray cluster answers there" in capsys.readouterr().err


def test_the_manifest_for_kubernetes_asks_for_what_its_command_asks_for(asked: list[Any]) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    program, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert program == "lrl" and main(words) == 0
    (_, found), cluster = asked[0], manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {found.nodes}
    (container,) = group["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == found.bundle["GPU"]
    assert float(container["resources"]["limits"]["cpu"]) >= found.bundle["CPU"]
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (stop,) = (one["value"] for one in head["template"]["spec"]["containers"][0]["env"])
    for spec in (head["template"]["spec"], group["template"]["spec"]):
        assert {one["name"] for one in spec["containers"][0]["volumeMounts"]} == {
            one["name"] for one in spec["volumes"]
        }
        assert min(int(stop), spec["terminationGracePeriodSeconds"]) > found.grace_s


def test_the_help_needs_no_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "lrl.cli.ray.find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    with pytest.raises(SystemExit) as ended:
        main(["ray", "--help"])
    assert ended.value.code == 0
    assert "--grace_s" in capsys.readouterr().out
