"""`lrl ray`: runs fit or validate on several nodes of a Ray cluster, by one command on one of them.

The settings are read here first, so a misspelled one is reported before anything is placed, and
what follows from them need not be given a second time. `ray job submit` can stand before the
command, and not in its place: it places no nodes, kills what it runs 3 s after `ray job stop`, and
its exit status is 1 whatever the run's was (Ray 2.60).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from jsonargparse import ArgumentParser

from lrl.cli.parsing import from_the_root
from lrl.cli.ray_request import RayRequest
from lrl.cli.recipes import with_recipe_paths
from lrl.errors import RayRunError
from lrl.system.quick_imports import quick_imports

VERBS = ("fit", "validate")
EXAMPLE = "lrl ray --nodes 2 fit --config own.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Places and runs it.

    Args:
        argv: The words after `lrl ray`.

    Returns:
        Exit status: the run's; 2 if the command is wrong, 1 if the run cannot be placed or a node
            is lost.
    """
    parser = ArgumentParser(
        prog="lrl ray",
        usage=f"lrl ray --nodes N [...] fit --config RECIPE [...]\n\nAs in: {EXAMPLE}",
        description="Train on several nodes of a Ray cluster: place one process on each, and print "
        "what they print.",
        allow_abbrev=False,
    )
    parser.add_class_arguments(RayRequest)
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((number for number, word in enumerate(words) if word in VERBS), len(words))
    before, own = parser.parse_args(words[:verb]), words[verb:]
    if find_spec("ray") is None:
        parser.error("the package ray is not installed: pip install 'lrl[ray]', here and on all.")
    from lrl.cli.ray_run import run

    if not own:
        parser.error(f"there is no fit and no validate: {EXAMPLE}")
    try:
        asked = RayRequest(**vars(before))
        settings = read_settings(with_recipe_paths(own))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if wrong := contradiction(settings, asked.nodes):
        parser.error(wrong)
    if asked.gpus is None:
        if (gpus := gpus_of_node(settings)) is None:
            parser.error(
                f"trainer.devices is {settings.devices!r}, which says only on the nodes how many "
                "GPUs it means: give --gpus, the GPUs of each node (0 for none)."
            )
        asked = replace(asked, gpus=gpus)
    try:
        return run([*own, "--trainer.num_nodes", str(asked.nodes)], asked)
    except RayRunError as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 1


def read_settings(words: Sequence[str]) -> Any:
    """Returns the trainer's settings without building anything; a wrong one ends this process with
    an error."""
    from lrl.system.import_by_name import with_current_folder

    with quick_imports():
        from lrl.cli.lightning import LrlCLI

    class Reading(LrlCLI):
        """Reads alone."""

        def _nothing(self, *_: Any) -> None:
            return

        _set_seed = instantiate_classes = _nothing
        _run_subcommand = _nothing  # type: ignore[assignment]

    with_current_folder()
    before = sys.argv
    sys.argv = [sys.argv[0], *from_the_root(words, words[0])]
    try:
        return Reading().config[words[0]].trainer  # LightningCLI reads sys.argv
    finally:
        sys.argv = before


def contradiction(settings: Any, nodes: int) -> str:
    """Returns why these settings cannot run on so many nodes; empty if they can."""
    from lrl.strategies.several_ranks import SeveralRanks
    from lrl.system.import_by_name import function

    if settings.num_nodes not in (1, nodes):
        return (
            f"trainer.num_nodes is {settings.num_nodes} and --nodes is {nodes}: leave "
            "trainer.num_nodes out."
        )
    path = getattr(settings.strategy, "class_path", settings.strategy)
    kind: Any = function(path) if "." in str(path) else object
    if nodes > 1 and not issubclass(kind, SeveralRanks):
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
    return int(devices) if devices.isdecimal() else None
