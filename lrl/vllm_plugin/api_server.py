"""The program of a generator: vLLM's API server, `python -m lrl.vllm_plugin.api_server FLAGS`.

Imports are most of its start on a CPU. An engine that is spawned imports this module again.
"""

import runpy

from lrl.system.imports import quick_imports

with quick_imports():
    import vllm.v1.engine.async_llm  # noqa: F401 (brings nearly all that server and engine import)

if __name__ == "__main__":
    # In a namespace of its own: this module stays `__main__`, which a spawned engine imports.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
