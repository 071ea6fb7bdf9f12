"""All of lrl that runs inside vLLM's processes: a plugin, routes of the API server, engines of
weight transfer.

Hides vLLM's internals. Outside of this room vLLM is imported only where a server is started and at
the trainer's ends of transports (`weights/communicator.py`, `ipc.py`, `nccl.py`, `wire.py`).
`relied_on.py` lists every name of vLLM that lrl touches; the test of the contract compares it with
each release that lrl claims.
"""
