"""The simulator: the real controller, routing and packing on a virtual clock."""
