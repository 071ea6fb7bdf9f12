"""Every name of vLLM that lrl relies on beyond its imports, which the test finds by itself."""

TRANSFER = "vllm.distributed.weight_transfer"
ENGINE = "vllm.v1.engine"
LAYERS = "vllm.model_executor.layers"
LOADER = "vllm.model_executor.model_loader"
NCCL = "vllm.distributed.device_communicators"

MEMBERS = {
    f"{ENGINE}.core.EngineCoreProc": "process_output_sockets() output_queue",
    f"{ENGINE}.EngineCoreOutput": (
        "request_id new_token_ids new_logprobs finish_reason events "
        "new_prompt_logprobs_tensors prompt_token_id_logprobs pooling_output prefill_stats "
        "routed_experts new_sampling_mask kv_transfer_params ec_transfer_params "
        "mm_cache_miss_hashes"
    ),
    f"{ENGINE}.EngineCoreOutputs": (
        "outputs weight_version utility_output finished_requests scheduler_stats"
    ),
    "vllm.v1.metrics.stats.SchedulerStats": "prefix_cache_stats",
    f"{ENGINE}.logprobs.LogprobsProcessor": (
        "_update_sample_logprobs() tokenizer logprobs cumulative_logprob"
    ),
    "vllm.logprobs.FlatLogprobs": (
        "start_indices end_indices token_ids logprobs ranks decoded_tokens"
    ),
    "vllm.v1.outputs.LogprobsLists": (
        "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens"
    ),
    f"{ENGINE}.output_processor.RequestState": (
        "_new_completion_output() _weight_version_spans() request_id"
    ),
    "vllm.platforms.cpu.CpuPlatform": "check_and_update_config()",
    "vllm.platforms.interface.Platform": "is_cpu()",
    f"{ENGINE}.async_llm.AsyncLLM": "generate() get_weight_version() engine_core",
    f"{ENGINE}.core_client.AsyncMPClient": "outputs_queue",
    "vllm.outputs.CompletionOutput": "index token_ids logprobs finish_reason weight_versions",
    "vllm.outputs.WeightVersionSpan": "version start end",
    "vllm.sampling_params.SamplingParams": (
        "n max_tokens temperature logprobs detokenize output_kind flat_logprobs "
        "prompt_logprobs ignore_eos stop_token_ids"
    ),
    "vllm.sampling_params.RequestOutputKind": "DELTA",
    f"{TRANSFER}.factory.WeightTransferEngineFactory": "_registry register_engine()",
    f"{TRANSFER}.base.WeightTransferEngine": (
        "init_transfer_engine() start_weight_update() update_weights() receive_weights() "
        "finish_weight_update() shutdown() parse_update_info() init_info_cls update_info_cls "
        "device model vllm_config model_config parallel_config"
    ),
    f"{LAYERS}.fused_moe.fused_moe_method_base.FusedMoEMethodBase": "moe_kernel",
    f"{LOADER}.default_loader.DefaultModelLoader": "get_all_weights()",
    "vllm.config.load.LoadConfig": "use_tqdm_on_load",
    f"{NCCL}.pynccl.PyNcclCommunicator": (
        "disabled available device nccl comm rank broadcast() group_start() group_end()"
    ),
    f"{NCCL}.pynccl_wrapper.NCCLLibrary": "ncclGetUniqueId() ncclCommAbort()",
}
"""By class, in the module that defines it. A member is written with `()` where lrl calls or
overrides it, without where it reads or sets it: a method that becomes a property breaks lrl, and
the other way round."""

CALLS: dict[str, tuple[int, str]] = {
    f"{ENGINE}.core:EngineCoreProc.process_output_sockets": (3, ""),
    f"{ENGINE}.logprobs:LogprobsProcessor._update_sample_logprobs": (1, ""),
    f"{ENGINE}.output_processor:RequestState._weight_version_spans": (0, ""),
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config": (1, ""),
    "vllm.inputs.engine:tokens_input": (1, "cache_salt"),
    f"{ENGINE}.async_llm:AsyncLLM.generate": (3, "priority"),
    f"{ENGINE}.async_llm:AsyncLLM.get_weight_version": (0, ""),
    f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine": (3, ""),
    f"{TRANSFER}.base:WeightTransferEngine.__init__": (4, ""),
    f"{LOADER}.reload.layerwise:initialize_layerwise_reload": (1, ""),
    f"{LOADER}.reload.layerwise:finalize_layerwise_reload": (2, ""),
    f"{LOADER}:get_model_loader": (1, ""),
    f"{LOADER}.default_loader:DefaultModelLoader.get_all_weights": (2, ""),
    f"{TRANSFER}.nccl_common:uid_init_process_group": (4, ""),
    f"{NCCL}.pynccl:PyNcclCommunicator.broadcast": (1, "src stream"),
}
"""By `module:function` or `module:Class.method`: how many positional arguments, without `self`, and
the names of the others, in lrl's calls to vLLM and in vLLM's to lrl's replacement."""

NAMES = {
    "route": (
        "/health /inference/v1/generate /pause /resume /is_paused /weight_info "
        "/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update "
        "/update_weights /finish_weight_update /tokenize /classify /v1/models "
        "/v1/chat/completions /v1/chat/completions/derender /v1/completions"
    ),
    "variable": (
        "VLLM_SERVER_DEV_MODE VLLM_PLUGINS VLLM_NO_USAGE_STATS VLLM_WORKER_MULTIPROC_METHOD "
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_CPU_OMP_THREADS_BIND"
    ),
    "flag": (
        "model port host ssl-keyfile ssl-certfile enable-scale-out weight-transfer-config "
        "logprobs-mode generation-config scheduling-policy disable-uvicorn-access-log "
        "max-model-len max-num-seqs dtype quantization tensor-parallel-size enforce-eager "
        "gpu-memory-utilization distributed-executor-backend block-size kv-cache-memory-bytes "
        "middleware tool-call-parser enable-auto-tool-choice runner convert"
    ),
}
"""Of routes, environment variables and flags."""
