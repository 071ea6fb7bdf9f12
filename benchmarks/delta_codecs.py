"""What is left of a version when it travels as its difference to the one before, by the way of compressing it.

    python -m benchmarks.delta_codecs                         measure and print; about two minutes
    python -m benchmarks.delta_codecs --layers 1 --lrs 1e-6     a rehearsal
    python -m benchmarks.delta_codecs --print-only            print what is there

A Llama (`benchmarks.weight_transports`) is trained by AdamW in float32 on random tokens. The XOR of its last two
versions, each in one number format, is compressed on one core. `runs` is zlib at level 1 with its strategy for runs,
which `lrl.weights.delta` uses; zstd is measured if the package zstandard is installed, which lrl does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import arguments, records
from benchmarks.weight_transports import MB, Version, two_versions

HEAD = "| lr | format | MB | weights that changed | codec | left | compressed (MB/s) | restored (MB/s) |\n" + "|---" * 8
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def codecs() -> dict[str, Codec]:
    """Returns how each codec compresses and restores."""

    def runs(data: bytes) -> bytes:
        stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
        return stream.compress(data) + stream.flush()

    found: dict[str, Codec] = {
        "zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress),
        "zlib 1, runs": (runs, zlib.decompress),
    }
    if importlib.util.find_spec("zstandard"):
        zstandard: Any = importlib.import_module("zstandard")
        for level in (1, 3):
            compressor = zstandard.ZstdCompressor(level=level)
            found[f"zstd {level}"] = (compressor.compress, zstandard.ZstdDecompressor().decompress)
    return found


def in_format(version: Version, dtype: str) -> np.ndarray:
    """Returns all weights of a version as unsigned integers of the format's width."""
    kind, width = getattr(torch, dtype), {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    parts = [weight.to(kind).flatten().view(torch.uint8).numpy() for weight in version.values()]
    return np.concatenate(parts).view(width)


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    made = records.read(args.out)
    for lr in args.lrs:
        if all(records.find(made, run) for run in runs_of(args) if run["lr"] == lr):
            continue
        versions = two_versions(args.layers, lr, args.steps)
        for run in (run for run in runs_of(args) if run["lr"] == lr and records.find(made, run) is None):
            before, after = (in_format(version, run["dtype"]) for version in versions)
            difference = before ^ after
            data, found = difference.tobytes(), dict[str, list[float | None]]()
            for name, (compress, restore) in codecs().items():
                started = time.process_time()
                small = compress(data)
                between = time.process_time()
                if restore(small) != data:
                    raise RuntimeError(f"{name} does not restore what it compressed.")
                figures = len(small) / len(data), between - started, time.process_time() - between
                share, compressing_s, restoring_s = figures
                speeds = (len(data) / MB / seconds for seconds in (compressing_s, restoring_s))
                found[name] = [records.rounded(value) for value in (share, *speeds)]
            changed = records.rounded(np.count_nonzero(difference) / difference.size)
            records.append(
                args.out, run | {"mb": len(data) / MB, "changed": changed, "found": found, "command": command}
            )
            logging.info("%s", run | found)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    how = {"layers": args.layers, "steps": args.steps}
    return [how | {"lr": lr, "dtype": dtype} for lr in args.lrs for dtype in ("bfloat16", "float32")]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [f"{HEAD}|"]
    for one in made:
        head = f"| {one['lr']:g} | {one['dtype']} | {one['mb']:,.0f} | {one['changed']:.2%} "
        for codec, (share, compressed, restored) in one["found"].items():
            lines.append(f"{head}| {codec} | {share:.2%} | {compressed:,.0f} | {restored:,.0f} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_codecs", description=__doc__.splitlines()[0])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-6, 1e-5], help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the policy (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of AdamW (%(default)s)")
    arguments.add_print_only(parser, "delta_codecs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
