"""`lrl dequantize`: a quantised model written whole, so that it can be trained."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.system.quick_imports import quick_imports


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the model of the command line whole.

    Args:
        argv: The words after `lrl dequantize`.

    Returns:
        Exit status: 2 if the model cannot be found, read, or written whole.
    """
    parser = argparse.ArgumentParser(
        prog="lrl dequantize",
        description="Write a model that is quantised as mxfp4 (gpt-oss) or fp8 whole.",
    )
    parser.add_argument(
        "model", help="the quantised model: a folder in Hugging Face format, or a name on the hub"
    )
    parser.add_argument("folder", type=Path, help="where to write it; a new folder")
    kinds = ("bfloat16", "float32")
    help_text = "of the weights (bfloat16); float32 is twice as large and exact"
    parser.add_argument("--dtype", choices=kinds, default=kinds[0], help=help_text)
    args = parser.parse_args(argv)
    with quick_imports():
        from transformers import logging

        from lrl.system import hub
        from lrl.training.dequantisation import dequantize

    logging.disable_progress_bar()
    try:
        number = dequantize(hub.whole_folder(args.model), args.folder, args.dtype)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
    whole = shlex.quote(str(args.folder))
    sys.stdout.write(
        f"{number} tensors were quantised; the whole model is in {whole}: --model.model {whole}\n"
    )
    return 0
