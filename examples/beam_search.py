"""Beam search, and what beams share; MODEL and TOKENS of the prompt may follow the command."""

import sys

from winnow import LLM
from winnow_beams import BeamSearchParams, beam_search


def main() -> None:
    model, tokens = (*sys.argv[1:3], *[None, "256"][len(sys.argv[1:3]) :])
    with LLM(model, kv_memory="256MiB", prefill_chunk=512) as llm:
        assert llm.tokenizer is not None, "both models have one"
        prose = llm.tokenizer.encode(
            "The rain fell, the lamps were lit, and nobody was on the road. " * int(tokens)
        )
        found = beam_search(llm, prose[: int(tokens)], BeamSearchParams(beam_width=4, max_tokens=32))
        for answer in found.sequences:
            print(f"{answer.score:8.3f}  {answer.text!r}")
        shared, apart = found.kv_bytes_peak, found.kv_bytes_unshared
        one = llm.kv_bytes(int(tokens) + 31)
        print(
            f"4 beams of {tokens} + 32 tokens: {shared / one:.2f} times one's memory, {apart / one:.2f} without sharing"
        )


if __name__ == "__main__":
    main()
