"""A score of one's own: which KVs stay is a class of a few lines, and real memory comes back.

The idea tried here: keep the KVs whose values are long. Run it beside KV-Compress and with the full cache; and the norm
as a factor of a score there is, under a budget whose rows keep a floor and whose first layer stays wide.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.eviction import AdaptiveRows, ByValueNorm, EvictionPolicy, Keep, LayerRows, Scorer, When, Window


@dataclass(frozen=True)
class ValueNorm(Scorer):
    """Score a KV by the length of its value vector."""

    def score(self, rows: LayerRows) -> Tensor:
        return rows.values().norm(dim=-1)  # [sequences, heads, KVs]


# On the command line: winnow run prompts.jsonl -o out.jsonl --eviction examples/own_score.py:MINE --compression 4
MINE = EvictionPolicy(ValueNorm(), AdaptiveRows(), Keep(sinks=4, recent=16), When(after_prefill=True))


def main() -> None:
    composed = replace(
        MINE, score=ByValueNorm(Window(size=16)), budget=AdaptiveRows(row_floor=0.2, layer_floor=0.5)
    )
    prose = "It rained all morning, and the road to the harbour was empty. The lamps were lit early. " * 30
    prompt = f"{prose}The color of Maria is green. {prose}\nQuestion: What is the color of Maria?\nAnswer:"
    llm = LLM(kv_memory="64MiB", kv_floor=32)
    for policy in ("full", "kv-compress", MINE, composed):
        compression = None if policy == "full" else 8
        params = SamplingParams(temperature=0.0, max_tokens=4, eviction=policy, compression=compression)
        [output] = llm.generate(prompt, params)
        answer, report = output.outputs[0], output.outputs[0].eviction
        name = policy if isinstance(policy, str) else type(policy.score).__name__
        if report is None:
            print(f"{name:12} {answer.text!r}: every KV of {len(output.prompt_token_ids)} tokens")
        else:
            freed = report.bytes_freed / (report.bytes_freed + report.bytes_held)
            print(
                f"{name:12} {answer.text!r}: {report.compression:.1f}x, {freed:.0%} of the memory given back"
            )


if __name__ == "__main__":
    main()
