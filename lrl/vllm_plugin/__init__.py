"""All of lrl that runs inside vLLM's processes. `tests/vllm_contract/relied_on.py` lists every name
of vLLM that lrl touches."""
