"""The vLLM plugin (entry point `vllm.general_plugins`), loaded in each of its processes: it registers lrl's engine."""


def register() -> None:
    """Registers the shared-memory engine; vLLM may call this more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "shared_memory" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "shared_memory", "lrl.weights.shared_memory_engine", "SharedMemoryEngine"
        )
