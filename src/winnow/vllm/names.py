"""vLLM's words that Winnow does not have: what each is called here, which values change nothing, and why others are
refused. One table for Python, the command line and docs/vllm.md.
"""

from collections.abc import Mapping
from typing import Any

from winnow.values.foreign_names import ANY, ForeignName
from winnow.values.units import gibibytes


def _group(names: str, note: str, *harmless: str, **more: Any) -> dict[str, ForeignName]:
    return {name: ForeignName(note, harmless, **more) for name in names.split()}


_ACCEPTED = "accepted: answers do not depend on it"


def _free(names: str, note: str = _ACCEPTED, **more: Any) -> dict[str, ForeignName]:
    """Return names whose every value is accepted."""
    return _group(names, note, *ANY, **more)


def _off(names: str, note: str) -> dict[str, ForeignName]:
    """Return switches that must be off."""
    return _group(names, note, "false", switch=True)


_ONE_DEVICE = "a model is cut over devices by tensor_parallel_size alone"
_ONE_PROCESS = "the processes of tensor_parallel_size are on this machine: there is nothing to place"
_TEXT = "pictures go as the model's processor takes them; no video, no sound"
_PROCESSOR = "pictures are processed as the model's own processor_config.json says"
_NO_ADAPTERS = "adapters are not served side by side: the option lora merges one into the weights"
_NO_DRAFTS = "speculative_config says how tokens are proposed: by method ngram, draft_model or mtp"
_GENERATES = "text is generated; embeddings, scores and classes are not served"
_FORMS = "llguidance constrains answers to every form"
_READ = "read by the model's own response_template, or by --response-template NAME or FILE"

ENGINE: Mapping[str, ForeignName] = {
    "kv_cache_memory_bytes": ForeignName("all memory of the KV cache", means="kv_memory"),
    "swap_space": ForeignName(
        "host memory for KVs of preempted requests; a number is of GiB, 0 is none",
        means="kv_offloading_size",
        convert=gibibytes,
    ),
    "num_gpu_blocks_override": ForeignName("Winnow takes a size instead of blocks: kv_memory"),
    "cpu_offload_gb": ForeignName(
        "weights stay on their device; weight_dtype=int8 halves them, value_tier moves values of KVs", ("0",)
    ),
    "cpu_offload_params": ForeignName("weights stay on their device"),
    "kv_offloading_backend": ForeignName("KVs move to host memory by Winnow's own copies", ("native",)),
    "pipeline_parallel_size": ForeignName(_ONE_DEVICE, ("1",), short="-pp"),
    "data_parallel_size": ForeignName("start a server for each device", ("1",), short="-dp"),
    **_group(
        "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size data_parallel_size_local nnodes",
        _ONE_DEVICE,
        "1",
    ),
    **_off(
        "data_parallel_hybrid_lb data_parallel_external_lb enable_expert_parallel enable_dbo enable_eplb "
        "worker_use_ray ray_workers_use_nsight",
        _ONE_DEVICE,
    ),
    **_free(
        "data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "data_parallel_backend master_addr master_port node_rank all2all_backend ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization "
        "eplb_config expert_placement_strategy num_redundant_experts eplb_window_size eplb_step_interval "
        "eplb_log_balancedness max_parallel_loading_workers disable_custom_all_reduce",
        _ONE_PROCESS,
    ),
    "distributed_executor_backend": ForeignName("a model runs in processes of this machine", ("uni", "mp")),
    **_group(
        "worker_cls worker_extension_cls scheduler_cls additional_config",
        "Winnow's parts are not replaced by class name: eviction, and classes of its parts, are options",
        "auto",
    ),
    "tokenizer_mode": ForeignName("tokenizers are transformers' own", ("auto", "hf", "slow")),
    **_group("tokenizer_revision code_revision", "revision is of the whole repository", same_as="revision"),
    **_free("skip_tokenizer_init", "accepted: prompts may be token ids", switch=True),
    **_free(
        "trust_remote_code",
        "accepted: no code from a model's directory is run, and a model that needs such is refused",
        switch=True,
    ),
    "quantization": ForeignName(
        "weights are read as they were stored, also quantized ones; weight_dtype quantizes others",
        ("none", "gguf", "compressed-tensors", "gptq", "awq", "fp8", "modelopt", "fbgemm_fp8"),
        short="-q",
    ),
    **_group(
        "quantization_param_path quantization_config qlora_adapter_name_or_path",
        "weights are read as they were stored: a GGUF file holds quantized ones",
    ),
    **_free("calculate_kv_scales", "accepted: scales of kv_cache_dtype follow from the KVs", switch=True),
    "kv_cache_dtype_skip_layers": ForeignName("kv_wide=layers=1 keeps first layers in 16 bits"),
    **_group("config_format", "a model has a config.json, or is a GGUF file", "auto", "hf"),
    **_group(
        "hf_config_path model_weights rope_scaling rope_theta hf_overrides override_attention_dtype",
        "the model is what its config.json says: edit a copy of it",
    ),
    "hf_token": ForeignName(
        "the Hub's token comes from the environment's HF_TOKEN or from `hf auth login`", secret=True
    ),
    "download_dir": ForeignName("models of the Hub go where the environment's HF_HOME says"),
    **_group("runner task", _GENERATES, "auto", "generate"),
    **_group("convert", _GENERATES, "auto", "none"),
    **_group("pooler_config override_pooler_config", _GENERATES),
    "override_generation_config": ForeignName(
        "give SamplingParams, or generation_config=DIR with a generation_config.json"
    ),
    "max_logprobs": ForeignName("accepted: at most 64 logprobs are served", ANY),
    "logprobs_mode": ForeignName(
        "logprobs are those of the model's logits, before temperature and filters", ("raw_logprobs",)
    ),
    "logits_processors": ForeignName(
        "logits are not changed by user code; SamplingParams has logit_bias and structured_outputs"
    ),
    **_free("enforce_eager", "accepted: what is launched as a graph computes the same", switch=True),
    **_free("enable_chunked_prefill", "accepted: prefill_chunk says how long chunks are", switch=True),
    **_free(
        "disable_log_stats disable_log_requests enable_log_requests aggregate_engine_logging kv_cache_metrics "
        "cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing use_v2_block_manager "
        "disable_cascade_attn disable_async_output_proc async_scheduling use_tqdm_on_load "
        "multi_step_stream_outputs disable_hybrid_kv_cache_manager kv_sharing_fast_prefill "
        "enable_return_routed_experts fail_on_environ_validation enable_logging_iteration_details "
        "enable_mm_processor_stats enable_multimodal_encoder_data_parallel allow_deprecated_quantization",
        switch=True,
    ),
    **_free(
        "cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size max_seq_len_to_capture "
        "compilation_config attention_config kernel_config profiler_config optimization_level performance_mode "
        "stream_interval num_scheduler_steps num_lookahead_slots preemption_mode scheduler_delay_factor "
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
        "prefix_caching_hash_algo safetensors_load_strategy pt_load_map_location "
        "show_hidden_metrics_for_version kv_cache_metrics_sample mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode override_neuron_config shutdown_timeout tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config tokens_only model_impl model_loader_extra_config "
        "ignore_patterns logits_processor_pattern"
    ),
    **_off("disable_sliding_window", "a model's windows are part of what it computes"),
    **_group(
        "otlp_traces_endpoint collect_detailed_traces", "the server's metrics are Prometheus's, at /metrics"
    ),
    **_group(
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
        "KVs stay in one process; winnow prefix save writes compressed prefixes to a directory",
    ),
    **_off("enable_sleep_mode", "LLM.close() frees the memory"),
    **_off("enable_prompt_embeds", "prompts are text, token ids or messages"),
    **_free(
        "guided_decoding_backend structured_outputs_config guided_decoding_disable_fallback "
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
        f"accepted: {_FORMS}",
    ),
    **_group(
        "reasoning_parser_plugin enable_reasoning",
        "the server's --response-template NAME or FILE reads reasoning",
        "false",
    ),
    **_group("speculative_model num_speculative_tokens spec_method spec_model spec_tokens", _NO_DRAFTS),
    **_off("enable_lora enable_lora_bias enable_prompt_adapter", _NO_ADAPTERS),
    **_free(
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size fully_sharded_loras "
        "max_prompt_adapters max_prompt_adapter_token enable_tower_connector_lora "
        "specialize_active_lora",
        "accepted: adapters are not served",
    ),
    "default_mm_loras": ForeignName(_NO_ADAPTERS),
    **_free(
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend media_io_kwargs mm_processor_kwargs video_pruning_rate",
        f"accepted: {_TEXT}",
    ),
    **_free(
        "disable_mm_preprocessor_cache disable_chunked_mm_input skip_mm_profiling interleave_mm_strings",
        f"accepted: {_TEXT}",
        switch=True,
    ),
    **_off("enable_mm_embeds mm_encoder_only", _TEXT),
    "io_processor_plugin": ForeignName(_TEXT),
    "served_model_name": ForeignName("accepted: a server alone has clients that name its model", ANY),
    "reasoning_parser": ForeignName("accepted: the server alone splits reasoning from answers", ANY),
}
"""Arguments of `LLM` and `EngineArgs`, which are flags too."""

SHARED: tuple[str, ...] = (
    "model", "revision", "dtype", "max_model_len", "load_format", "tensor_parallel_size", "generation_config",
    "seed", "device", "attention_backend", "gpu_memory_utilization", "block_size", "enable_prefix_caching",
    "kv_cache_dtype", "kv_offloading_size", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy",
    "speculative_config",
)  # fmt: skip
"""Arguments of both. None, which is vLLM's default of many, is as if they were left out."""

SERVER: Mapping[str, ForeignName] = {
    "tool_call_parser": ForeignName(f"tool calls are {_READ}"),
    "reasoning_parser": ForeignName(f"reasoning is {_READ}"),
    "tool_parser_plugin": ForeignName("--response-template FILE reads tool calls"),
    "tool_server": ForeignName("tools are called by clients"),
    "chat_template": ForeignName("the chat template is the one in the model's directory"),
    "chat_template_content_format": ForeignName("the chat template takes texts", ("auto", "string")),
    "default_chat_template_kwargs": ForeignName("a request brings chat_template_kwargs"),
    **_off("trust_request_chat_template", "the chat template is the one in the model's directory"),
    "response_role": ForeignName("answers are the assistant's", ("assistant",)),
    "lora_modules": ForeignName(_NO_ADAPTERS),
    "prompt_adapters": ForeignName(_NO_ADAPTERS),
    "api_server_count": ForeignName("one process serves", ("1",)),
    **_group(
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold",
        "start a server for each device",
    ),
    **_off("headless", "one process serves"),
    "uvicorn_log_level": ForeignName("say --log-level", ANY),
    **_group("log_config_file max_log_len", "say --log-level"),
    **_group(
        "allowed_origins allowed_methods allowed_headers allow_credentials middleware root_path",
        "put a reverse proxy before the server",
    ),
    **_group(
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers",
        "let a reverse proxy speak TLS before the server",
    ),
    "config": ForeignName("options are flags; @FILE is not read"),
    **_off("disable_fastapi_docs", "say --no-docs"),
    **_free("enable_auto_tool_choice", "accepted: tools are always the model's choice", switch=True),
    **_free(
        "disable_uvicorn_access_log disable_frontend_multiprocessing enable_request_id_headers "
        "enable_prompt_tokens_details enable_server_load_tracking enable_tokenizer_info_endpoint "
        "enable_log_outputs enable_log_deltas log_error_stack exclude_tools_when_tool_choice_none "
        "enable_ssl_refresh enable_offline_docs enable_per_request_metrics enable_flash_late_interaction "
        "cohere_is_reasoning_model",
        switch=True,
    ),
    **_free(
        "h11_max_incomplete_event_size h11_max_header_count fingerprint_mode fingerprint_value cohere_format "
        "disable_access_log_for_endpoints"
    ),
    **_off("enable_force_include_usage", "clients ask for stream_options.include_usage"),
    **_off("return_tokens_as_token_ids", "tokens are texts"),
}
"""Further flags of `vllm serve`."""

RESPONSE_TEMPLATES: Mapping[str, str] = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "deepseek_r1": "think",
    "qwen3": "think",
}
"""Values of `tool_call_parser` and `reasoning_parser` -> the `response_template` that does the same."""

_NO_BEAMS = "winnow_beams.beam_search(llm, prompt, BeamSearchParams(beam_width=4)) searches"

SAMPLING: Mapping[str, ForeignName] = {
    **_group("use_beam_search early_stopping", _NO_BEAMS, "false"),
    "length_penalty": ForeignName(_NO_BEAMS, ("1",)),
    "guided_decoding": ForeignName("the form of the answer", means="structured_outputs"),
    "best_of": ForeignName(
        "n answers are returned: sample more, and choose by cumulative_logprob", ("1",), "n"
    ),
    "allowed_token_ids": ForeignName("structured_outputs says what an answer may be"),
    "logits_processors": ENGINE["logits_processors"],
    "spaces_between_special_tokens": ForeignName(
        "special tokens are written as the tokenizer does", ("true",)
    ),
    "truncate_prompt_tokens": ForeignName("prompts are not cut: compression keeps long ones small"),
    "flat_logprobs": ForeignName("logprobs are dictionaries", ("false",)),
    "trace_decode_token_ids": ForeignName(
        "tokens that the answer begins with in place of sampled ones", means="forced_tokens"
    ),
    **_group(
        "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start",
        "logprobs and prompt_logprobs report the most probable tokens, up to 64, at every position",
    ),
    "thinking_token_budget": ForeignName("max_tokens limits the answer, its reasoning included"),
    "extra_args": ForeignName("SamplingParams has every parameter as a field"),
    "repetition_detection": ForeignName("repetition_penalty discourages repetition"),
    **_free(
        "skip_clone output_text_buffer_length skip_reading_prefix_cache stream_interval "
        "routed_experts_prompt_start"
    ),
}
"""Fields of `SamplingParams`."""

BENCH: Mapping[str, ForeignName] = {
    "backend": ForeignName(
        "servers of OpenAI's API are measured; --endpoint says which of its paths",
        ("vllm", "openai", "openai-chat"),
    ),
    "dataset_name": ForeignName(
        "prompts are random tokens, or --dataset and --trace name a file", ("random",)
    ),
    **_free("tokenizer tokenizer_mode num_warmups metadata label", "accepted: prompts are token ids"),
    **_free("disable_tqdm trust_remote_code disable_detokenize", switch=True),
    **_off("save_result", "--json FILE writes the results"),
    **_group("result_dir result_filename output_json", "--json FILE writes the results"),
    "dataset_path": ForeignName("--dataset FILE.jsonl has one prompt a line, --trace FILE a recorded trace"),
    **_free("percentile_metrics", "accepted: ttft, tpot, itl and e2el are reported"),
}
"""Further flags of `vllm bench serve` and `vllm bench throughput`."""

STRUCTURED: Mapping[str, ForeignName] = {
    "structural_tag": ForeignName("a grammar in Lark's syntax says the same: grammar"),
    "whitespace_pattern": ForeignName('say it in the schema: "x-guidance": {"whitespace_pattern": "..."}'),
    **_group(
        "disable_any_whitespace",
        'say it in the schema: "x-guidance": {"whitespace_flexible": false}',
        "false",
    ),
    "disable_additional_properties": ForeignName(
        'say "additionalProperties": false in the schema', ("false",)
    ),
    **_free("backend _backend backend_was_auto _backend_was_auto disable_fallback", f"accepted: {_FORMS}"),
}
"""Fields of `StructuredOutputsParams` and `GuidedDecodingParams`."""

CALL: Mapping[str, ForeignName] = {
    "lora_request": ForeignName(_NO_ADAPTERS),
    "prompt_adapter_request": ForeignName(_NO_ADAPTERS),
    "guided_options_request": ForeignName("SamplingParams has structured_outputs"),
    "prompt_token_ids": ForeignName('a prompt may be a list of token ids, or {"prompt_token_ids": ids}'),
    "chat_template_content_format": SERVER["chat_template_content_format"],
    "mm_processor_kwargs": ForeignName(_PROCESSOR),
    "tokenization_kwargs": ForeignName("LLM.tokenize has add_special_tokens, and generate takes token ids"),
    "concurrency_limit": ForeignName("accepted: max_num_seqs is the limit", ANY),
}
"""Arguments of `LLM.generate` and `LLM.chat`."""

PROMPT: Mapping[str, ForeignName] = {
    **_group("multi_modal_uuids prompt_embeds", "prompts are text, token ids and multi_modal_data"),
    "mm_processor_kwargs": ForeignName(_PROCESSOR),
    "cache_salt": ForeignName("tenant= of generate keeps prefixes apart"),
    "token_type_ids": ForeignName("models that only generate have none"),
    "data_parallel_rank": ForeignName("start a server for each device", ("0",)),
}
"""Keys of `TextPrompt` and `TokensPrompt`."""

METHODS: Mapping[str, ForeignName] = {
    **_group("embed encode classify score reward", _GENERATES),
    **_group("sleep wake_up", "LLM.close() frees the memory"),
    **_group("start_profile stop_profile", "winnow bench measures; stats().elapsed has seconds by phase"),
    **_group("collective_rpc apply_model llm_engine", "LLM runs the model in its own process"),
    **_group("enqueue wait_for_completion", "LLM.submit queues a request, LLM.step computes"),
    "from_engine_args": ForeignName("LLM(**vars(engine_args))"),
    "beam_search": ForeignName(_NO_BEAMS),
}
"""Methods of `LLM`."""

CLASSES: Mapping[str, ForeignName] = {
    **_group(
        "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput "
        "ClassificationRequestOutput ScoringOutput ScoringRequestOutput",
        _GENERATES,
    ),
    "ModelRegistry": ForeignName("models are transformers' classes: nothing is registered"),
    "LoRARequest": ForeignName(_NO_ADAPTERS),
    **_group("BeamSearchParams BeamSearchOutput BeamSearchSequence", _NO_BEAMS),
    "initialize_ray_cluster": ForeignName(_ONE_DEVICE),
}
"""Further names of the package `vllm`."""

_SAMPLING = "winnow.sampling.params"
_STRUCTURED = "winnow.sampling.structured"
_HERE = "winnow_vllm"
_METRICS = {name: "winnow.vllm.metrics" for name in ("Metric", "Counter", "Gauge", "Histogram", "Vector")}
_PARSER = {"FlexibleArgumentParser": _HERE}
_ENGINE_ARGS = {"EngineArgs": _HERE, "AsyncEngineArgs": _HERE}
_ENGINES = {"LLMEngine": _HERE, "AsyncLLMEngine": _HERE, "AsyncLLM": _HERE}
_PROMPTS = {"TextPrompt": "winnow.prompts", "TokensPrompt": "winnow.prompts", "PromptType": "winnow.prompts"}
_CLEANUP = {"cleanup_dist_env_and_memory": _HERE}

MODULES: Mapping[str, Mapping[str, str]] = {
    "sampling_params": {
        **{"SamplingParams": _SAMPLING, "RequestOutputKind": _SAMPLING},
        **{"GuidedDecodingParams": _STRUCTURED, "StructuredOutputsParams": _STRUCTURED},
    },
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "beam_search": {},
    "engine.arg_utils": _ENGINE_ARGS,
    "engine.llm_engine": _ENGINES,
    "engine.async_llm_engine": _ENGINES,
    "entrypoints": {},
    "entrypoints.llm": {"LLM": "winnow.llm"},
    "lora": {},
    "lora.request": {},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": _ENGINES,
    "v1.engine.llm_engine": _ENGINES,
    "v1.metrics": {},
    "v1.metrics.reader": _METRICS,
    "utils": {**_PARSER, "random_uuid": _HERE},
    "utils.argparse_utils": _PARSER,
    "distributed": _CLEANUP,
    "distributed.parallel_state": _CLEANUP,
    "usage": {},
    "usage.usage_lib": {"UsageContext": _HERE},
    "logger": {"init_logger": _HERE},
}
"""Modules of the package `vllm` -> the names in each that scripts import, and where they are here."""
