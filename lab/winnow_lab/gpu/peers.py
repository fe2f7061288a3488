"""Peers on the same card in the same run. Nothing here imports Winnow: vLLM may lie in an environment of its own."""

import time

import torch

from winnow_lab.gpu.rows import Work, milliseconds, put

PAGE = 16


def transformers(work: Work, device: str) -> None:
    """`generate` with SDPA: one batch of those that the scarce memory holds."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**work.values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    prompts = torch.tensor(work.prompts()[: work.fitting], device=device)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(2)
    first, new = seconds(1), max(work.new // 4, 2)
    step = (seconds(new) - first) / (new - 1)
    rate = work.fitting * work.new / (first + step * (work.new - 1))
    put(f"transformers, SDPA, {work.fitting} at a time", rate, "tokens/s")
    put(f"transformers, decode step of {work.fitting}", 1e3 * step, "ms")


def flashinfer(device: str) -> None:
    """Decoding over pages with one table for all heads, and with every KV head a sequence of its own."""
    import flashinfer

    batch, context, queries, heads, dim = 64, 4096, 32, 8, 128
    pages = context // PAGE
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    kvs = torch.randn(batch * pages, 2, PAGE, heads, dim, device=device, dtype=torch.bfloat16)
    split = kvs.permute(0, 3, 1, 2, 4).reshape(-1, 2, PAGE, 1, dim).contiguous()
    for name, memory, rows, kv_heads in (
        ("one table", kvs, batch, heads),
        ("a table per head", split, batch * heads, 1),
    ):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(rows + 1, dtype=torch.int32, device=device) * pages,
            torch.randperm(len(memory), device=device, dtype=torch.int32),
            torch.full((rows,), PAGE, dtype=torch.int32, device=device),
            queries * kv_heads // heads,
            kv_heads,
            dim,
            PAGE,
            q_data_type=torch.bfloat16,
            data_type=torch.bfloat16,
        )
        q = torch.randn(rows, queries * kv_heads // heads, dim, device=device, dtype=torch.bfloat16)
        spent = milliseconds(lambda run=wrapper.run, q=q, memory=memory: run(q, memory), device)
        put(f"FlashInfer, decode 64 x 4,096, {name}", spent, "ms", bytes=kvs.nbytes)


def vllm(work: Work) -> None:
    """vLLM with the KV memory of the scarce sequences, and with memory for all."""
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=work.new, ignore_eos=True, detokenize=False)
    for sequences in (work.sequences + 1, work.fitting):
        llm = LLM(
            model=str(work.directory()),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=work.prompt + work.new,
            max_num_seqs=work.sequences,
            kv_cache_memory_bytes=int(1.02 * sequences * (work.prompt + work.new) * work.kv_bytes),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in work.prompts()]
        llm.generate(
            prompts[:2], SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False
        )
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        put(f"vLLM, memory for {sequences}", work.sequences * work.new / seconds, "tokens/s")
        del llm
        torch.cuda.empty_cache()
