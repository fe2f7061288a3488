"""One engine on a GGUF file's own bits, for own_bits.py: winnow or llama.cpp, model, threads, tokens of a prompt."""

import json
import os
import random
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()
MOST_TOKENS = 4096


def measure(name: str, model: str, threads: int, prompt_tokens: int) -> dict[str, float]:
    if name == "winnow":
        from winnow import LLM, SamplingParams

        llm = LLM(model, threads=threads, kv_memory="256MiB", enable_prefix_caching=False)
    else:
        from llama_cpp_peer import complete, open_server

        alone, many = (
            open_server(Path(model), threads, n, size) for n, size in ((1, MOST_TOKENS), (16, 128))
        )

    def seconds(count: int, tokens: int, new: int) -> float:
        chance = random.Random(count)
        prompts = [chance.choices(range(3, 60), k=tokens) for _ in range(count)]
        begin = time.perf_counter()
        if name == "winnow":
            llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
        else:
            complete(alone if count == 1 else many, prompts, new, ignore_eos=True)
        return time.perf_counter() - begin

    seconds(1, 4, 1)
    found = {"start": time.perf_counter() - BEGIN}
    for key, count, new in (("one", 1, 64), ("16", 16, 32)):
        whole, first = (min(seconds(count, 16, each) for _ in range(2)) for each in (new, 1))
        found[key] = count * (new - 1) / (whole - first)
    found["prompt"] = prompt_tokens / seconds(1, prompt_tokens, 1)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return found | {"resident": kib["VmRSS:"] / 1024, "not mapped": kib["RssAnon:"] / 1024}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3], *map(int, sys.argv[3:5]))), flush=True)
    os._exit(0)  # without waiting for a server's threads
