"""Dispatch policies: the generator and the order of the requests. YAML names a policy by its
`class_path`.

Hides how waiting requests are ordered. A policy sees only them, the load of each generator, and
expected lengths.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.routing.dispatch.base import (
        DispatchPolicy,
        ExpectedLengths,
        GeneratorLoad,
        Home,
        Request,
    )
    from lrl.routing.dispatch.greedy import LeastLoaded, LeastTokens, RoundRobin
    from lrl.routing.dispatch.skewness_aware import SkewnessAware

__all__, __getattr__, __dir__ = lazy_names(__name__)
