"""What lrl relies on in vLLM, and whether a release of vLLM still has it; see
`tests/test_vllm_contract.py`."""
