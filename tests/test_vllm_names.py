"""vLLM's words: each one is Winnow's too, accepted, or refused with what Winnow has instead; none is unknown."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow import EngineArgs, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from winnow.config import PARTS, EngineConfig
from winnow.errors import ConfigError, InvalidRequestError, UsageError, WinnowError
from winnow.prompt.prompts import TokensPrompt
from winnow.server.config import ServerConfig
from winnow.values.foreign_names import ANY, ForeignName, translate
from winnow.vllm import names as vllm

DOC = Path(__file__).parent.parent / "docs" / "vllm.md"
OPTIONS = {each.name for part in PARTS.values() for each in fields(part)}
KINDS: Mapping[str, tuple[Mapping[str, ForeignName], set[str]]] = {
    "engine": (vllm.ENGINE, OPTIONS),
    "server": (
        vllm.SERVER,
        OPTIONS | {each.name for each in fields(ServerConfig)} | set(vllm.ENGINE) - set(vllm.SERVER),
    ),
    "sampling": (vllm.SAMPLING, {each.name for each in fields(SamplingParams)}),
    "structured": (vllm.STRUCTURED, {each.name for each in fields(StructuredOutputsParams)}),
    "call": (
        vllm.CALL,
        {
            *("prompts", "messages", "params", "sampling_params", "use_tqdm", "priority", "tools"),
            *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
        },
    ),
    "prompt": (vllm.PROMPT, set(TokensPrompt.__annotations__)),
}
# Of vLLM's sources, from version 0.6 on: EngineArgs and LLM.__init__, FrontendArgs, SamplingParams and so on.
VLLM: Mapping[str, str] = {
    "engine": """
        model served_model_name tokenizer hf_config_path runner convert task skip_tokenizer_init enable_prompt_embeds
        tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
        safetensors_load_strategy load_format config_format dtype kv_cache_dtype seed max_model_len cuda_graph_sizes
        cudagraph_capture_sizes max_cudagraph_capture_size distributed_executor_backend pipeline_parallel_size
        master_addr master_port nnodes node_rank tensor_parallel_size prefill_context_parallel_size
        decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend
        enable_expert_parallel all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
        expert_placement_strategy num_redundant_experts eplb_window_size eplb_step_interval eplb_log_balancedness
        max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo disable_sliding_window
        disable_cascade_attn use_v2_block_manager swap_space cpu_offload_gb gpu_memory_utilization
        kv_cache_memory_bytes max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills
        long_prefill_token_threshold max_num_seqs max_logprobs logprobs_mode disable_log_stats
        aggregate_engine_logging revision code_revision hf_token hf_overrides tokenizer_revision quantization
        enforce_eager max_seq_len_to_capture disable_custom_all_reduce limit_mm_per_prompt enable_mm_embeds
        interleave_mm_strings media_io_kwargs mm_processor_kwargs disable_mm_preprocessor_cache mm_processor_cache_gb
        mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
        mm_encoder_attn_backend io_processor_plugin skip_mm_profiling video_pruning_rate enable_lora
        enable_lora_bias max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype
        lora_extra_vocab_size ray_workers_use_nsight num_gpu_blocks_override num_lookahead_slots
        model_loader_extra_config ignore_patterns preemption_mode scheduler_delay_factor enable_chunked_prefill
        disable_chunked_mm_input disable_hybrid_kv_cache_manager guided_decoding_backend
        guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
        guided_decoding_disable_additional_properties structured_outputs_config logits_processor_pattern
        speculative_config show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing
        disable_async_output_proc scheduling_policy scheduler_cls pooler_config override_pooler_config
        compilation_config worker_cls worker_extension_cls profiler_config kv_transfer_config kv_events_config
        ec_transfer_config generation_config enable_sleep_mode override_generation_config model_impl
        override_attention_dtype attention_backend calculate_kv_scales mamba_cache_dtype mamba_ssm_cache_dtype
        mamba_block_size additional_config use_tqdm_on_load pt_load_map_location logits_processors async_scheduling
        stream_interval kv_sharing_fast_prefill optimization_level kv_offloading_size kv_offloading_backend
        tokens_only device rope_scaling rope_theta num_scheduler_steps multi_step_stream_outputs tokenizer_pool_size
        tokenizer_pool_type tokenizer_pool_extra_config enable_prompt_adapter max_prompt_adapters
        max_prompt_adapter_token quantization_param_path override_neuron_config enable_reasoning reasoning_parser
        reasoning_parser_plugin disable_log_requests allow_deprecated_quantization mamba_cache_mode enable_mfu_metrics
        enable_logging_iteration_details enable_mm_processor_stats enable_tower_connector_lora specialize_active_lora
        attention_config performance_mode shutdown_timeout weight_transfer_config fail_on_environ_validation
        enable_return_routed_experts model_weights enable_multimodal_encoder_data_parallel
    """,
    "server": """
        host port uds uvicorn_log_level disable_uvicorn_access_log allow_credentials allowed_origins allowed_methods
        allowed_headers api_key served_model_name lora_modules prompt_adapters chat_template
        chat_template_content_format trust_request_chat_template default_chat_template_kwargs response_role ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_cert_reqs enable_ssl_refresh root_path middleware return_tokens_as_token_ids
        disable_frontend_multiprocessing enable_request_id_headers enable_auto_tool_choice
        exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin tool_server log_config_file max_log_len
        disable_fastapi_docs enable_prompt_tokens_details enable_server_load_tracking enable_force_include_usage
        enable_tokenizer_info_endpoint enable_log_outputs enable_log_requests h11_max_incomplete_event_size
        h11_max_header_count log_error_stack api_server_count headless config reasoning_parser
        enable_per_request_metrics enable_log_deltas cohere_is_reasoning_model cohere_format tokens_only
        fingerprint_mode fingerprint_value data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold disable_access_log_for_endpoints
        ssl_ciphers enable_offline_docs enable_flash_late_interaction
    """,
    "sampling": """
        n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed
        use_beam_search length_penalty early_stopping stop stop_token_ids bad_words include_stop_str_in_output
        ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize skip_special_tokens
        spaces_between_special_tokens logits_processors truncate_prompt_tokens output_kind output_text_buffer_length
        guided_decoding structured_outputs logit_bias allowed_token_ids extra_args skip_clone
        skip_reading_prefix_cache thinking_token_budget repetition_detection stream_interval logprob_token_ids
        prompt_logprob_token_ids prompt_logprob_start routed_experts_prompt_start trace_decode_token_ids
    """,
    "structured": """
        json regex choice grammar json_object structural_tag backend whitespace_pattern disable_fallback
        disable_any_whitespace disable_additional_properties _backend _backend_was_auto
    """,
    "call": """
        prompts messages params sampling_params prompt_token_ids use_tqdm lora_request prompt_adapter_request
        guided_options_request priority tokenization_kwargs chat_template chat_template_content_format
        add_generation_prompt continue_final_message tools chat_template_kwargs mm_processor_kwargs concurrency_limit
    """,
    "prompt": """
        prompt prompt_token_ids multi_modal_data multi_modal_uuids mm_processor_kwargs cache_salt token_type_ids
    """,
}
ROWS = [(kind, name) for kind, (names, _) in KINDS.items() for name in names]
# Harmless to no row, unless any value is.
NO_VALUE = "what no engine knows"


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_of_vllm_is_unknown(kind: str) -> None:
    names, own = KINDS[kind]
    assert not set(VLLM[kind].split()) - own - set(names)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_row_accepts_translates_or_says_what_there_is(kind: str, name: str) -> None:
    names, own = KINDS[kind]
    row = names[name]

    def translated(value: Any, **others: Any) -> dict[str, Any]:
        return translate({name: value, **others}, names, own, UsageError, "word")

    assert name not in own, "Winnow has the word itself"
    assert row.note and len(row.note.splitlines()) == 1
    assert translated(None) == {}
    if row.means is not None:
        assert row.means in own
        assert translated(NO_VALUE) == {row.means: NO_VALUE}
        with pytest.raises(UsageError, match=f"{name} and {row.means} mean the same"):
            translated(NO_VALUE, **{row.means: 1})
        return
    if row.harmless == ANY:
        assert translated(NO_VALUE) == {}
        return
    for value in row.harmless:
        assert translated(value) == {}
    with pytest.raises(UsageError) as refused:
        translated(NO_VALUE)
    assert str(refused.value) == f"{name}{'' if row.secret else f'={NO_VALUE!r}'}: {row.note}"


@pytest.mark.parametrize(
    "harmless",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        {"enforce_eager": True, "trust_remote_code": True, "enable_chunked_prefill": True},
        {"quantization": None, "disable_log_stats": True, "max_logprobs": 20, "cpu_offload_gb": 0.0},
        {"model": "org/name", "tokenizer": "org/name", "revision": "a", "tokenizer_revision": "a"},
        {"hf_overrides": {}, "rope_scaling": None},
        {"max_num_seqs": None, "max_num_batched_tokens": None, "block_size": None, "seed": None},
        {"runner": "generate", "task": "auto", "tokenizer_mode": "auto", "seed": 0},
    ],
)
def test_what_says_nothing_changes_nothing(harmless: dict[str, Any]) -> None:
    own = {name: value for name, value in harmless.items() if name in ("model", "revision")}
    assert EngineConfig.from_options(harmless) == EngineConfig.from_options(own)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: a model is cut over devices"),
        ({"quantization": "marlin"}, "quantization='marlin': weights are read as they were stored"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4: weights stay on their device"),
        (
            {"hf_token": "hf_secret"},
            r"^hf_token: the Hub's token comes from the environment's HF_TOKEN[^=]*$",
        ),
        ({"runner": "pooling"}, "runner='pooling': text is generated; embeddings"),
        (
            {"tensor_paralel_size": 1},
            "unknown option 'tensor_paralel_size'; did you mean tensor_parallel_size?",
        ),
        ({"max_model_length": 9}, "unknown option 'max_model_length'; did you mean max_model_len?"),
    ],
)
def test_what_winnow_does_otherwise_is_said(given: dict[str, Any], message: str) -> None:
    for make in (EngineConfig.from_options, lambda options: EngineArgs(**options)):
        with pytest.raises(ConfigError, match=message):
            make(given)


@pytest.mark.parametrize(
    ("given", "size"), [(4, 4 * 2**30), (0.5, 2**29), ("4", 4 * 2**30), ("64MiB", 2**26), (0, None)]
)
def test_swap_space_is_of_gib(given: Any, size: int | None) -> None:
    assert EngineConfig.from_options({"swap_space": given}).cache.kv_offloading_size == size


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *(("half", "float16"), ("float", "float32"), ("auto", "auto"), ("bfloat16", "bfloat16")),
        (torch.float16, "float16"),
    ],
)
def test_dtypes_as_vllm_says_them(given: Any, dtype: str) -> None:
    assert EngineConfig.from_options({"dtype": given}).model.dtype == dtype


def test_engine_args_are_the_options() -> None:
    args = EngineArgs(model="org/name", max_model_len=2048, tensor_parallel_size=1, dtype="half")
    assert (args.max_model_len, args.max_num_seqs) == (2048, 64)
    expected = EngineConfig.from_options({"model": "org/name", "max_model_len": 2048, "dtype": "half"})
    assert EngineConfig.from_options(vars(args)) == EngineConfig.from_options(asdict(args)) == expected


def test_sampling_parameters_as_vllm_says_them() -> None:
    form = GuidedDecodingParams(regex="a+", backend="xgrammar", disable_fallback=True)
    assert SamplingParams(guided_decoding=form).form == StructuredOutputsParams(regex="a+")
    assert SamplingParams(n=2, best_of=2) == SamplingParams(n=2)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 2, "best_of": 3}, "best_of=3: n answers are returned"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean temperature"),
    ]
    for given, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            SamplingParams(**given)
    with pytest.raises(
        InvalidRequestError, match="unknown field of structured_outputs 'regx'; did you mean regex"
    ):
        StructuredOutputsParams(**{"regx": "a"})


def test_the_page_is_the_table() -> None:
    """Every row stands in docs/vllm.md as the data says it."""
    page = DOC.read_text(encoding="utf-8")
    for kind, (names, _) in KINDS.items():
        expected = "\n".join(table(names))
        assert expected in page, f"docs/vllm.md must hold, for {kind}:\n{expected}"
    for names in (vllm.METHODS, vllm.CLASSES):
        expected = "\n".join(table(names))
        assert expected in page, f"docs/vllm.md must hold, for methods and classes:\n{expected}"


@pytest.mark.parametrize("name", vllm.CLASSES)
def test_classes_are_refused_where_they_are_imported(name: str) -> None:
    with pytest.raises(ImportError, match=f"^winnow has no '{name}': {re.escape(vllm.CLASSES[name].note)}$"):
        exec(f"from winnow import {name}")  # noqa: S102  # the line of a script


def table(names: Mapping[str, ForeignName]) -> list[str]:
    """Rows of Markdown; names with the same answer share one."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, row in names.items():
        values = "any" if row.harmless == ANY else ", ".join(row.harmless)
        if row.same_as:
            values += f"{', ' * bool(values)}as `{row.same_as}`"
        note = row.note.removeprefix("accepted: ")
        grouped.setdefault((values, row.means or "", note), []).append(f"`{name}`")
    return [
        f"| {', '.join(words)} | {f'`{means}`' if means else ''} | {values} | {escape(note)} |"
        for (values, means, note), words in grouped.items()
    ]


def escape(text: str) -> str:
    return re.sub(r"([|<>*])", r"\\\1", text)


def test_winnow_error_is_raised_for_every_kind() -> None:
    for names, own in KINDS.values():
        with pytest.raises(WinnowError, match="unknown word 'zzz'; Known: "):
            translate({"zzz": 1}, names, own, UsageError, "word")
