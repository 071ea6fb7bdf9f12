"""Data sheets of accelerators, and clusters made of them.

Figures are peaks as their makers print them, dense (without sparsity) and in one direction; what of a peak is reached
is the roofline's to say. A sheet's gigabyte is read as 10^9 bytes. The parts hold about 7 % more, which is left to the
driver. A price is nobody's figure but the user's, so there is none here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB, TB, TFLOPS = 1e9, 1e12, 1e12
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    bf16_flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    fp8_flops: float
    """FLOP/s of dense float8 matrix products; 0 where there are none."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes/s between memory and processor."""
    node_link: float
    """Bytes/s that it sends to the devices of its node, while it receives as many (half of what a sheet prints)."""
    network: float
    """Bytes/s that it sends to other nodes; a property of the node it is sold in."""
    source: str
    """Where the figures are from."""


SHEETS = (
    Device(
        name="H100",
        bf16_flops=989.4 * TFLOPS,
        fp8_flops=1978.9 * TFLOPS,
        memory=80 * GB,
        bandwidth=3.35 * TB,
        node_link=450 * GB,
        network=50 * GB,
        source="NVIDIA H100 data sheet, SXM; network: DGX H100, 400 Gb/s a device",
    ),
    Device(
        name="H200",
        bf16_flops=989.4 * TFLOPS,
        fp8_flops=1978.9 * TFLOPS,
        memory=141 * GB,
        bandwidth=4.8 * TB,
        node_link=450 * GB,
        network=50 * GB,
        source="NVIDIA H200 data sheet, SXM; network: DGX H200, 400 Gb/s a device",
    ),
    Device(
        name="H800",
        bf16_flops=989.5 * TFLOPS,
        fp8_flops=1979.0 * TFLOPS,
        memory=80 * GB,
        bandwidth=3.35 * TB,
        node_link=200 * GB,
        network=25 * GB,
        source="StreamRL (2504.15930), table 1, network 8 x 200 Gb/s a node; float8 as in H100, the same chip",
    ),
    Device(
        name="H20",
        bf16_flops=148 * TFLOPS,
        fp8_flops=296 * TFLOPS,
        memory=96 * GB,
        bandwidth=4.0 * TB,
        node_link=450 * GB,
        network=50 * GB,
        source="StreamRL (2504.15930), table 1; float8 twice bfloat16; network as in H100's node, an assumption",
    ),
    Device(
        name="A100-80GB",
        bf16_flops=312 * TFLOPS,
        fp8_flops=0.0,
        memory=80 * GB,
        bandwidth=2.039 * TB,
        node_link=300 * GB,
        network=25 * GB,
        source="NVIDIA A100 80GB data sheet, SXM; network: DGX A100, 200 Gb/s a device",
    ),
    Device(
        name="B200",
        bf16_flops=2250 * TFLOPS,
        fp8_flops=4500 * TFLOPS,
        memory=180 * GB,
        bandwidth=8.0 * TB,
        node_link=900 * GB,
        network=50 * GB,
        source="NVIDIA DGX B200 data sheet, an eighth of it and half of its figures with sparsity",
    ),
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
        """Nodes that `devices` devices fill."""
        return -(-devices // self.devices_per_node)

    @property
    def outward(self) -> float:
        """Bytes/s from a device of one group to one of another, say from the trainer to a generator."""
        return self.device.node_link if self.nodes_of(self.count) == 1 else self.device.network

    def link(self, members: int, stride: int = 1) -> float:
        """Bytes/s at which each of `members` devices takes part in a collective; every `stride`-th device is one.

        Within a node it is the node's own link. Across nodes the members of a node share their network ports, so a ring
        over all of them enters a node through all of its ports at once.
        """
        together = max(1, self.devices_per_node // stride)
        if members <= together:
            return self.device.node_link
        return min(self.device.node_link, together * self.device.network)


def parse_cluster(text: str, setting: str = "--cluster", devices_per_node: int = DEVICES_PER_NODE) -> Cluster:
    """The cluster that a text like `8xH100` names.

    Args:
        text: Number of devices, `x`, and the name of a sheet.
        setting: What an error calls it.
        devices_per_node: Devices that share a node's own link.

    Raises:
        ValueError: The text has another form, a number below 1, or a name without a sheet.
    """
    names = ", ".join(device.name for device in SHEETS)
    match = re.fullmatch(r"(\d+)\s*[xX*]\s*(\S+)", text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError(f"{setting} is {text!r}; give a number and a device, like 8xH100. Known are {names}.")
    if match[2].lower() not in KNOWN:
        raise ValueError(f"{setting} is {text!r}, and there is no data sheet of {match[2]!r}. Known are {names}.")
    if devices_per_node < 1:
        raise ValueError(f"--devices-per-node is {devices_per_node}; it must be at least 1.")
    return Cluster(device=KNOWN[match[2].lower()], count=int(match[1]), devices_per_node=devices_per_node)
