"""Every name of vLLM that lrl relies on beyond its imports, which the test finds by itself.

A member is written with `()` where lrl calls or overrides it, without where it reads or sets it: a
method that becomes a property breaks lrl, and the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

TRANSFER = "vllm.distributed.weight_transfer"


class Members(NamedTuple):
    """The required members of a class."""

    by: str
    """The file of lrl that relies on it, in `lrl/`."""
    module: str
    name: str
    members: str
    """Divided by spaces."""


class Call(NamedTuple):
    """A call of lrl's to a function or method of vLLM, or vLLM's call to lrl's replacement."""

    by: str
    module: str
    name: str
    """`function` or `Class.method`."""
    positional: int
    """Number of positional arguments, without `self`."""
    keywords: str = ""
    """Names divided by spaces."""


MEMBERS = (
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.core",
        "EngineCoreProc",
        "process_output_sockets() output_queue",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine",
        "EngineCoreOutput",
        (
            "request_id new_token_ids new_logprobs finish_reason events "
            "new_prompt_logprobs_tensors prompt_token_id_logprobs pooling_output prefill_stats "
            "routed_experts new_sampling_mask kv_transfer_params ec_transfer_params "
            "mm_cache_miss_hashes"
        ),
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine",
        "EngineCoreOutputs",
        "outputs weight_version utility_output finished_requests scheduler_stats",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        "prefix_cache_stats",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.logprobs",
        "LogprobsProcessor",
        "_update_sample_logprobs() tokenizer logprobs cumulative_logprob",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.logprobs",
        "FlatLogprobs",
        "start_indices end_indices token_ids logprobs ranks decoded_tokens",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.outputs",
        "LogprobsLists",
        "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens",
    ),
    Members(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.output_processor",
        "RequestState",
        "_new_completion_output() _weight_version_spans() request_id",
    ),
    Members(
        "vllm_plugin/plugin.py",
        "vllm.platforms.cpu",
        "CpuPlatform",
        "check_and_update_config()",
    ),
    Members("vllm_plugin/plugin.py", "vllm.platforms.interface", "Platform", "is_cpu()"),
    Members(
        "vllm_plugin/write_route.py",
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "generate() get_weight_version() engine_core",
    ),
    Members(
        "vllm_plugin/write_route.py",
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
        "outputs_queue",
    ),
    Members(
        "vllm_plugin/write_route.py",
        "vllm.outputs",
        "CompletionOutput",
        "index token_ids logprobs finish_reason weight_versions",
    ),
    Members("vllm_plugin/write_route.py", "vllm.outputs", "WeightVersionSpan", "version start end"),
    Members(
        "vllm_plugin/write_route.py",
        "vllm.sampling_params",
        "SamplingParams",
        (
            "n max_tokens temperature logprobs detokenize output_kind flat_logprobs "
            "prompt_logprobs ignore_eos stop_token_ids"
        ),
    ),
    Members("vllm_plugin/write_route.py", "vllm.sampling_params", "RequestOutputKind", "DELTA"),
    Members(
        "vllm_plugin/plugin.py",
        f"{TRANSFER}.factory",
        "WeightTransferEngineFactory",
        "_registry register_engine()",
    ),
    Members(
        "vllm_plugin/engines.py",
        f"{TRANSFER}.base",
        "WeightTransferEngine",
        (
            "init_transfer_engine() start_weight_update() update_weights() receive_weights() "
            "finish_weight_update() shutdown() parse_update_info() init_info_cls update_info_cls "
            "device model vllm_config model_config parallel_config"
        ),
    ),
    Members(
        "vllm_plugin/engines.py",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base",
        "FusedMoEMethodBase",
        "moe_kernel",
    ),
    Members(
        "vllm_plugin/engines.py",
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader",
        "get_all_weights()",
    ),
    Members(
        "vllm_plugin/engines.py",
        "vllm.config.load",
        "LoadConfig",
        "use_tqdm_on_load",
    ),
    Members(
        "weights/nccl.py",
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator",
        "disabled available device nccl comm rank broadcast() group_start() group_end()",
    ),
    Members(
        "weights/nccl.py",
        "vllm.distributed.device_communicators.pynccl_wrapper",
        "NCCLLibrary",
        "ncclGetUniqueId() ncclCommAbort()",
    ),
)

CALLS = (
    Call(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.core",
        "EngineCoreProc.process_output_sockets",
        3,
    ),
    Call(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.logprobs",
        "LogprobsProcessor._update_sample_logprobs",
        1,
    ),
    Call(
        "vllm_plugin/output_batching.py",
        "vllm.v1.engine.output_processor",
        "RequestState._weight_version_spans",
        0,
    ),
    Call(
        "vllm_plugin/plugin.py",
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        1,
    ),
    Call(
        "vllm_plugin/write_route.py", "vllm.inputs.engine", "tokens_input", 1, keywords="cache_salt"
    ),
    Call(
        "vllm_plugin/write_route.py",
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        3,
        keywords="priority",
    ),
    Call(
        "vllm_plugin/write_route.py", "vllm.v1.engine.async_llm", "AsyncLLM.get_weight_version", 0
    ),
    Call(
        "vllm_plugin/plugin.py",
        f"{TRANSFER}.factory",
        "WeightTransferEngineFactory.register_engine",
        3,
    ),
    Call(
        "vllm_plugin/engines.py",
        f"{TRANSFER}.base",
        "WeightTransferEngine.__init__",
        4,
    ),
    Call(
        "vllm_plugin/engines.py",
        "vllm.model_executor.model_loader.reload.layerwise",
        "initialize_layerwise_reload",
        1,
    ),
    Call(
        "vllm_plugin/engines.py",
        "vllm.model_executor.model_loader.reload.layerwise",
        "finalize_layerwise_reload",
        2,
    ),
    Call(
        "vllm_plugin/engines.py",
        "vllm.model_executor.model_loader",
        "get_model_loader",
        1,
    ),
    Call(
        "vllm_plugin/engines.py",
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        2,
    ),
    Call("weights/nccl.py", f"{TRANSFER}.nccl_common", "uid_init_process_group", 4),
    Call(
        "weights/buckets.py",
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.broadcast",
        1,
        keywords="src stream",
    ),
)

ROUTES = (
    "/health",
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/is_paused",
    "/weight_info",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/tokenize",
    "/classify",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/derender",
    "/v1/completions",
)

VARIABLES = (
    "VLLM_SERVER_DEV_MODE",
    "VLLM_PLUGINS",
    "VLLM_NO_USAGE_STATS",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_CPU_OMP_THREADS_BIND",
)

FLAGS = (
    "model",
    "port",
    "host",
    "ssl-keyfile",
    "ssl-certfile",
    "enable-scale-out",
    "weight-transfer-config",
    "logprobs-mode",
    "generation-config",
    "scheduling-policy",
    "disable-uvicorn-access-log",
    "max-model-len",
    "max-num-seqs",
    "dtype",
    "quantization",
    "tensor-parallel-size",
    "enforce-eager",
    "gpu-memory-utilization",
    "distributed-executor-backend",
    "block-size",
    "kv-cache-memory-bytes",
    "middleware",
    "tool-call-parser",
    "enable-auto-tool-choice",
    "runner",
    "convert",
)
