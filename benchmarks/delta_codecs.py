"""What is left of a version when it travels as its difference to the one before, by the way of
compressing it.

    python -m benchmarks.delta_codecs                         measure and print; about two minutes
    python -m benchmarks.delta_codecs --layers 1 --lrs 1e-6     a rehearsal
    python -m benchmarks.delta_codecs --print-only            print what is there

A Llama (`benchmarks.weight_transports`) is trained by AdamW in float32 on random tokens. What
differs between its last two versions, each in one number format, is compressed on one core, and
restored. `words that differ` is lrl's way (`lrl.weights.delta`). The others compress the XOR of the
whole versions: zlib at level 1, the same with its strategy for runs, and zstd if the package
zstandard is installed, which lrl does not need.
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
from lrl.weights.delta import PIECE, Bytes, compressed, restored

HEAD = (
    "| lr | format | MB | weights that changed | codec | left | compressed (MB/s) | restored "
    "(MB/s) |\n" + "|---" * 8
)
Codec = tuple[Callable[[Bytes, Bytes], bytes], Callable[[Bytes, bytes], Bytes]]
"""Makes of an older and a newer piece what is left, and of the older piece and what is left the
newer one."""


def codecs() -> dict[str, Codec]:
    """Returns how each codec compresses and restores."""

    def runs(data: bytes) -> bytes:
        stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
        return stream.compress(data) + stream.flush()

    found: dict[str, Codec] = {
        "words that differ": (compressed, restored),
        "zlib 1": of_xor(lambda data: zlib.compress(data, 1), zlib.decompress),
        "zlib 1, runs": of_xor(runs, zlib.decompress),
    }
    if importlib.util.find_spec("zstandard"):
        zstandard: Any = importlib.import_module("zstandard")
        for level in (1, 3):
            compressor = zstandard.ZstdCompressor(level=level)
            found[f"zstd {level}"] = of_xor(
                compressor.compress, zstandard.ZstdDecompressor().decompress
            )
    return found


def of_xor(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Codec:
    """Returns the codec that compresses the XOR."""
    return (
        lambda before, after: compress((before ^ after).tobytes()),
        lambda before, small: before ^ np.frombuffer(decompress(small), np.uint8),
    )


def in_format(version: Version, dtype: str) -> Bytes:
    """Returns the bytes of all weights of a version."""
    kind = getattr(torch, dtype)
    parts = [weight.to(kind).flatten().view(torch.uint8).numpy() for weight in version.values()]
    return np.concatenate(parts)


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    made = records.read(args.out)
    for lr in args.lrs:
        if all(records.find(made, run) for run in runs_of(args) if run["lr"] == lr):
            continue
        versions = two_versions(args.layers, lr, args.steps)
        for run in (
            run for run in runs_of(args) if run["lr"] == lr and records.find(made, run) is None
        ):
            before, after = (in_format(version, run["dtype"]) for version in versions)
            found = {name: figures(codec, before, after) for name, codec in codecs().items()}
            width = {"bfloat16": np.uint16, "float32": np.uint32}[run["dtype"]]
            changed = records.rounded(float(np.mean(before.view(width) != after.view(width))))
            records.append(
                args.out,
                run
                | {"mb": len(after) / MB, "changed": changed, "found": found, "command": command},
            )
            logging.info("%s", run | found)


def figures(codec: Codec, before: Bytes, after: Bytes) -> list[float | None]:
    """Returns the share that is left, and the megabytes of the version a second of compressing and
    of restoring.

    Raises:
        RuntimeError: The newer version does not come back.
    """
    compress, restore = codec
    left, seconds = 0, [0.0, 0.0]
    for start in range(0, len(after), PIECE):
        old, new = before[start : start + PIECE], after[start : start + PIECE]
        started = time.process_time()
        small = compress(old, new)
        between = time.process_time()
        made = restore(old, small)
        seconds = [seconds[0] + between - started, seconds[1] + time.process_time() - between]
        left += len(small)
        if not np.array_equal(made, new):
            raise RuntimeError("A codec does not restore what it compressed.")
    return [
        records.rounded(value)
        for value in (left / len(after), *(len(after) / MB / one for one in seconds))
    ]


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    how = {"layers": args.layers, "steps": args.steps}
    return [
        how | {"lr": lr, "dtype": dtype} for lr in args.lrs for dtype in ("bfloat16", "float32")
    ]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [f"{HEAD}|"]
    for one in made:
        head = f"| {one['lr']:g} | {one['dtype']} | {one['mb']:,.0f} | {one['changed']:.2%} "
        for codec, (share, making, restoring) in one["found"].items():
            lines.append(f"{head}| {codec} | {share:.2%} | {making:,.0f} | {restoring:,.0f} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.delta_codecs", description=__doc__.splitlines()[0]
    )
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
