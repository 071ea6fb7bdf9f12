"""Versions of the tokens of a response that is still being written.

vLLM notes which weights wrote which tokens, and tells it with the end of a response alone. A
half-written response may continue on another generator or in another run, so lrl needs its versions
with every frame. The trainer's own record of its syncs would not do: frames that were sent before a
pause may be read after the resume.
"""

from __future__ import annotations

from typing import Any

from lrl.generators.frames import REQUEST_PREFIX


def install() -> None:
    """Makes vLLM report the versions with every output of lrl's requests; may be called twice."""
    from vllm.v1.engine.output_processor import RequestState

    at_the_end = RequestState._new_completion_output
    if at_the_end.__name__ == "with_versions":
        return

    def with_versions(self: Any, *positional: Any, **named: Any) -> Any:
        output = at_the_end(self, *positional, **named)
        if output.weight_versions is None and REQUEST_PREFIX in self.request_id:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions
