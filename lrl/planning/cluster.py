"""Data sheets of accelerators, and clusters of them.

Figures are the makers' peaks, dense and in one direction. A sheet's gigabyte is read as 10^9 bytes;
the parts hold about 7 % more, which is left to the driver.
"""

import re
from dataclasses import dataclass

GB, TB, TFLOPS = 1e9, 1e12, 1e12
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    bf16_flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    fp8_flops: float
    """FLOP/s of dense float8 matrix products; 0 without float8."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes/s between memory and processor."""
    node_link: float
    """Bytes/s sent within its node, while it receives as many (half of a sheet's figure)."""
    network: float
    """Bytes/s sent to other nodes; a property of the node it is sold in."""


FIGURES = (
    # name, TFLOP/s of bfloat16 and of float8, memory in GB and TB/s, link and network in GB/s
    # NVIDIA H100 data sheet, SXM; network: DGX H100, 400 Gb/s a device
    ("H100", 989.4, 1978.9, 80, 3.35, 450, 50),
    # NVIDIA H200 data sheet, SXM; network: DGX H200, 400 Gb/s a device
    ("H200", 989.4, 1978.9, 141, 4.8, 450, 50),
    # StreamRL (2504.15930), table 1, network 8 x 200 Gb/s a node; float8 as in H100, the same chip
    ("H800", 989.5, 1979.0, 80, 3.35, 200, 25),
    # StreamRL (2504.15930), table 1; float8 twice bfloat16; network as in H100's node: a guess
    ("H20", 148, 296, 96, 4.0, 450, 50),
    # NVIDIA A100 80GB data sheet, SXM; network: DGX A100, 200 Gb/s a device
    ("A100-80GB", 312, 0, 80, 2.039, 300, 25),
    # NVIDIA A100 40GB data sheet, SXM; network as in the DGX A100
    ("A100-40GB", 312, 0, 40, 1.555, 300, 25),
    # NVIDIA DGX B200 data sheet, an eighth of it and half of its figures with sparsity
    ("B200", 2250, 4500, 180, 8.0, 900, 50),
    # NVIDIA Ada architecture whitepaper, products added up in float32; link: PCIe 4.0; network: a guess
    ("RTX4090", 165.2, 330.3, 24, 1.008, 32, 12.5),
)
SHEETS = tuple(
    Device(
        name,
        bf16_flops=bf16 * TFLOPS,
        fp8_flops=fp8 * TFLOPS,
        memory=memory * GB,
        bandwidth=bandwidth * TB,
        node_link=link * GB,
        network=network * GB,
    )
    for name, bf16, fp8, memory, bandwidth, link, network in FIGURES
)
KNOWN = {device.name.lower(): device for device in SHEETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind, in nodes."""

    device: Device
    count: int
    devices_per_node: int = DEVICES_PER_NODE

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"

    def nodes_of(self, devices: int) -> int:
        """Returns the nodes that `devices` devices fill."""
        return -(-devices // self.devices_per_node)

    @property
    def outward(self) -> float:
        """Bytes/s between devices of two groups, for example from the trainer to a generator."""
        return self.device.node_link if self.nodes_of(self.count) == 1 else self.device.network

    def link(self, members: int, stride: int = 1) -> float:
        """Returns the bytes/s of each of `members` devices in a collective; every `stride`-th
        device takes part.

        Within a node it is the node's own link. Across nodes the members of a node share their
        network ports, so a ring over all of them enters a node through all of its ports at once.
        """
        together = max(1, self.devices_per_node // stride)
        if members <= together:
            return self.device.node_link
        return min(self.device.node_link, together * self.device.network)


def parse_cluster(
    text: str, setting: str = "--cluster", devices_per_node: int = DEVICES_PER_NODE
) -> Cluster:
    """Returns the cluster that a text like `8xH100` (number, `x`, name of a sheet) names.

    Raises:
        ValueError: The text has another form, a number below 1, or a name without a sheet.
    """
    match = re.fullmatch(r"([1-9]\d*)x(\S+)", text.lower())
    if match is None or match[2] not in KNOWN:
        names = ", ".join(device.name for device in SHEETS)
        raise ValueError(f"{setting} is {text!r}; give a number and one of {names}, like 8xH100.")
    return Cluster(device=KNOWN[match[2]], count=int(match[1]), devices_per_node=devices_per_node)
