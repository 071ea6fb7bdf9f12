"""All of lrl that runs inside vLLM's processes: a plugin, routes of the API server, engines of
weight transfer.

Outside of this room vLLM is imported only where a server is started and at the trainer's end of NCCL
(`weights/nccl.py`). `tests/vllm_contract/relied_on.py` lists every name of vLLM that lrl touches.
"""
