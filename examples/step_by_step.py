"""Drive the engine yourself: submit requests while others run, read their answers as they grow, abort one.

python examples/step_by_step.py
"""

from winnow import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    with LLM(kv_memory="32MiB") as llm:
        first = llm.submit("The ship left the harbour", params)
        for _ in range(5):
            llm.step()
        second = llm.submit("In the beginning of spring", params)  # joins the running batch
        third = llm.submit("Nobody will read this", params)
        llm.step()
        llm.abort(third)
        texts = {}
        while llm.has_unfinished:
            for output in llm.step():
                texts[output.request_id] = output.outputs[0].text
        for request_id in (first, second):
            print(f"{request_id}: {texts[request_id]}")


if __name__ == "__main__":
    main()
