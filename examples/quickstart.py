"""Answer several prompts at once, within a fixed KV memory.

    python examples/quickstart.py

The embedded demo model looks facts up in its context; it knows nothing else.
"""

from winnow import LLM, SamplingParams

CONTEXT = (
    "It rained all morning, and the road to the harbour was empty. The color of Maria is green. "
    "Nobody had opened the shop since Tuesday. The city of Thomas is Vienna. The lamps were lit early."
)


def main() -> None:
    prompts = [
        f"{CONTEXT}\nQuestion: What is the color of Maria?\nAnswer:",
        f"{CONTEXT}\nQuestion: What is the city of Thomas?\nAnswer:",
    ]
    with LLM(kv_memory="32MiB") as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8)):
            completion = output.outputs[0]
            print(f"{output.request_id}: {completion.text.strip()!r} ({completion.finish_reason})")
        stats = llm.stats()
        print(f"peak KV memory: {stats.kv_bytes_peak:,} of {stats.kv_bytes_budget:,} bytes")


if __name__ == "__main__":
    main()
