"""Several samples of one prompt share the blocks that hold it: four answers cost little more than one.

python examples/samples.py
"""

from winnow import LLM, SamplingParams


def main() -> None:
    prompt = "The old man looked at the sea and said: " * 40
    peaks = {}
    for n in (1, 4):
        with LLM(kv_memory="32MiB") as llm:
            [output] = llm.generate(
                prompt, SamplingParams(n=n, seed=3, max_tokens=16, logprobs=0, ignore_eos=True)
            )
            peaks[n] = llm.stats().kv_bytes_peak
        for completion in output.outputs:
            print(
                f"n={n}, sample {completion.index}, logprob {completion.cumulative_logprob:.1f}: {completion.text!r}"
            )
    print(f"peak KV bytes: {peaks[1]:,} for one sample, {peaks[4]:,} for four")


if __name__ == "__main__":
    main()
