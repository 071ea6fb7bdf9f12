"""`lrl ray`: runs fit or validate on several nodes of a Ray cluster, by one command on one of them.

The settings are read here first, so a misspelled one is reported before anything is placed, and
what follows from them need not be given a second time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from lrl.cli.interpolation import from_the_root
from lrl.cli.recipes import with_recipe_paths
from lrl.system.quick_imports import quick_imports

VERBS = ("fit", "validate")
EXAMPLE = "lrl ray --nodes 2 fit --config own.yaml"
FEW_CPUS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Places and runs it.

    Args:
        argv: The words after `lrl ray`.

    Returns:
        Exit status: the run's; 2 if the command is wrong, 1 if the run cannot be placed or a node
            is lost.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    place = next((number for number, word in enumerate(words) if word in VERBS), len(words))
    args = parser.parse_args(words[:place])
    if place == len(words):
        parser.error(f"there is no fit and no validate: {EXAMPLE}")
    own = words[place:]
    try:
        settings = read_settings(with_recipe_paths(own))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if wrong := contradiction(settings, args.nodes):
        parser.error(wrong)
    gpus = gpus_of_node(settings) if args.gpus is None else args.gpus
    if gpus is None:
        parser.error(
            f"trainer.devices is {settings.devices!r}, which says only on the nodes how many GPUs "
            "it means: give --gpus, the GPUs of each node (0 for none)."
        )
    if find_spec("ray") is None:
        parser.error(
            "the package ray is not installed: pip install 'lrl[ray]', here and on each node."
        )
    return placed(args, own, gpus)


def placed(args: argparse.Namespace, words: Sequence[str], gpus: int) -> int:
    """Runs `lrl` with these words on nodes with so many GPUs; returns its exit status, or 1 with an
    error."""
    from lrl.cli import ray_run
    from lrl.members.launchers.ray import check_reachable

    try:
        check_reachable(args.address)
    except OSError as error:
        sys.stderr.write(
            f"lrl: error: --address is {args.address}, and nobody answers there: {error}\n"
        )
        return 1
    resources = {"CPU": args.cpus, "GPU": float(gpus), **args.resources}
    bundle = {name: amount for name, amount in resources.items() if amount}
    asked = ray_run.RayRequest(
        args.nodes, bundle, address=args.address, wait_s=args.wait_s, grace_s=args.grace_s
    )
    try:
        return ray_run.run([*words, "--trainer.num_nodes", str(args.nodes)], asked)
    except ray_run.RayRunError as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the words before `fit`."""
    parser = argparse.ArgumentParser(
        prog="lrl ray",
        usage=(
            "lrl ray --nodes N [...] fit --config RECIPE [...]\n\nAs in: ray job submit -- "
            f"{EXAMPLE}"
        ),
        description=(
            "Train on several nodes of a Ray cluster: place one process on each, and print what "
            "they print."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes", metavar="N", type=positive(int), required=True, help="nodes; trainer.num_nodes"
    )
    parser.add_argument(
        "--gpus", metavar="G", type=natural, help="GPUs of each node (trainer.devices, 0 on a CPU)"
    )
    parser.add_argument(
        "--cpus",
        metavar="C",
        type=positive(float),
        default=FEW_CPUS,
        help="CPU cores of each, as Ray counts them (1)",
    )
    parser.add_argument(
        "--resources",
        metavar="JSON",
        type=amounts,
        default={},
        help="Ray's own resources of each: '{\"h100\": 1}'",
    )
    parser.add_argument(
        "--address", default="auto", help="the cluster's, host:port (the one of this machine)"
    )
    parser.add_argument(
        *("--wait_s",),
        metavar="S",
        type=positive(float),
        default=1800.0,
        help="longest wait for the nodes (1800)",
    )
    parser.add_argument(
        *("--grace_s",),
        metavar="S",
        type=positive(float),
        default=600.0,
        help="longest wait for the run's end (600)",
    )
    return parser


def positive(kind: type[int] | type[float]) -> Any:
    """Returns a reader of numbers above 0."""

    def read(word: str) -> float:
        if not 0 < (number := kind(word)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{word} must be above 0")
        return number

    read.__name__ = kind.__name__  # argparse names it in its error
    return read


def natural(word: str) -> int:
    """Returns a number from 0 up."""
    if (number := int(word)) < 0:
        raise argparse.ArgumentTypeError(f"{word} must be 0 or more")
    return number


def amounts(word: str) -> dict[str, float]:
    """Returns Ray's custom resources."""
    try:
        found = json.loads(word)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(one, int | float) and one > 0 for one in found.values()
    ):
        raise argparse.ArgumentTypeError(
            f"""{word!r} is no mapping of names to numbers, as in '{{"h100": 1}}'"""
        )
    return {name: float(amount) for name, amount in found.items()}


def read_settings(words: Sequence[str]) -> Any:
    """Returns the trainer's settings without building anything; a wrong one ends this process with
    an error."""
    from lrl.system.import_by_name import with_current_folder

    with quick_imports():
        from lrl.cli.lightning import LrlCLI

    class Reading(LrlCLI):
        """Reads alone."""

        def _set_seed(self) -> None:
            return

        def instantiate_classes(self) -> None:
            return

        def _run_subcommand(self, subcommand: str) -> None:
            return

    with_current_folder()
    # LightningCLI reads it.
    before, sys.argv = (
        sys.argv,
        [sys.argv[0], *from_the_root(words, words[0])],
    )
    try:
        return Reading().config[words[0]].trainer
    finally:
        sys.argv = before


def contradiction(settings: Any, nodes: int) -> str:
    """Returns why these settings cannot run on so many nodes; empty if they can."""
    if settings.num_nodes not in (1, nodes):
        return (
            f"trainer.num_nodes is {settings.num_nodes} and --nodes is {nodes}: leave "
            "trainer.num_nodes out."
        )
    if nodes == 1:
        return ""
    from lrl.strategies.several_ranks import SeveralRanks
    from lrl.system.import_by_name import function

    path = getattr(settings.strategy, "class_path", settings.strategy)
    kind: Any = function(path) if "." in str(path) else None
    if kind is None or not issubclass(kind, SeveralRanks):
        return (
            f"trainer.strategy is {path}, which trains on one node, and --nodes is {nodes}: take "
            "lrl.AsyncDDP or lrl.AsyncFSDP."
        )
    return ""


def gpus_of_node(settings: Any) -> int | None:
    """Returns the GPUs that the settings ask of each node; None if only a node can tell."""
    if settings.accelerator == "cpu":
        return 0
    devices = str(settings.devices)
    return int(devices) if devices.isdigit() else None
