"""Clusters as they are typed, and the network between their devices."""

from __future__ import annotations

import pytest

from lrl.planning.cluster import SHEETS, Cluster, parse_cluster


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_clusters_of_every_sheet_are_parsed_in_lower_case(sheet: object) -> None:
    name: str = sheet.name  # type: ignore[attr-defined]
    assert parse_cluster(f"16x{name.lower()}") == Cluster(device=sheet, count=16)  # type: ignore[arg-type]


def test_a_ring_over_nodes_uses_the_network_ports_of_its_members() -> None:
    cluster = parse_cluster("64xH100")
    assert cluster.link(8) == 450e9
    assert cluster.link(16) == 8 * 50e9
    assert cluster.link(8, stride=8) == 50e9
    assert cluster.link(8, stride=2) == 4 * 50e9


@pytest.mark.parametrize("text", ["H100", "8xH999", "0xH100", "x", "8x", "-1xH100", "8.5xH100"])
def test_a_wrong_cluster_is_an_error_with_the_known_devices(text: str) -> None:
    with pytest.raises(
        ValueError,
        match="--cluster is .*H100, H200, H800, H20, A100-80GB, A100-40GB, B200, RTX4090",
    ):
        parse_cluster(text)
