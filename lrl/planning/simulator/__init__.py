"""The simulator: the real controller, routing and packing on a virtual clock.

Hides the models of generators, fleet and trainer; it imports torch.
"""
