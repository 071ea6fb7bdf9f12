"""What tests read in TensorBoard's event files."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG


def overview_of(events: EventAccumulator) -> dict[str, list[str]]:
    """Title -> tags of each chart of the one layout that was written."""
    (event,) = events.Tensors(CONFIG_SUMMARY_TAG)
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Overview"]
    found = {}
    for chart in layout.category[0].chart:
        margins = [tag for one in chart.margin.series for tag in (one.value, one.lower, one.upper)]
        found[chart.title] = [*chart.multiline.tag, *margins]
    return found
