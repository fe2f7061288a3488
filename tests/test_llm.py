"""The public face: what users call, what they get, and what they are told when it cannot be."""

import gc
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import prompt
from transformers import AutoModelForCausalLM

from winnow import LLM, RequestOutput, SamplingParams
from winnow.attention import AttentionSpec, BackendStep, PagedCache, Spans
from winnow.errors import CapacityError, ConfigError, ContextLengthError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="4MiB") as llm:
        yield llm


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


class TestGenerate:
    def test_outputs_come_in_the_order_of_prompts(self, llm: LLM) -> None:
        prompts = [prompt(n) for n in (200, 3, 50)]
        outputs = llm.generate(prompts, GREEDY)
        assert [o.prompt_token_ids for o in outputs] == prompts
        assert ids(outputs) == [ids(llm.generate(p, GREEDY))[0] for p in prompts]
        assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)

    def test_parameters_of_their_own(self, llm: LLM) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
        assert [len(t) for t in ids(llm.generate([prompt(9), prompt(9)], params))] == [1, 5]

    def test_prompts_in_dictionaries(self, llm: LLM) -> None:
        tokens = prompt(9)
        plain = ids(llm.generate(tokens, GREEDY))
        assert ids(llm.generate({"prompt_token_ids": tokens}, GREEDY)) == plain
        assert ids(llm.generate([{"prompt_token_ids": tokens}, {"prompt": tokens}], GREEDY)) == plain * 2

    def test_no_prompts_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], GREEDY) == []

    def test_samples_with_a_seed_repeat_and_differ_among_each_other(self, llm: LLM) -> None:
        params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
        first, second = (ids(llm.generate(prompt(20), params)) for _ in range(2))
        assert first == second
        assert len({tuple(tokens) for tokens in first}) > 1

    def test_stop_token_ends_and_is_named(self, llm: LLM) -> None:
        full = ids(llm.generate(prompt(20), GREEDY))[0]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[full[4]])
        completion = llm.generate(prompt(20), params)[0].outputs[0]
        assert completion.token_ids == full[: full.index(full[4]) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", full[4])

    def test_the_answer_ends_where_the_context_ends(self, llm: LLM) -> None:
        completion = llm.generate(prompt(4090), SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0]
        assert len(completion.token_ids) == 6
        assert completion.finish_reason == "length"

    def test_metrics(self, llm: LLM) -> None:
        metrics = llm.generate(prompt(20), GREEDY)[0].metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(times)
        assert metrics.latency >= metrics.time_to_first_token > 0


class TestLogprobs:
    def test_equal_the_models_own(self, llm: LLM, directory: Path) -> None:
        tokens = prompt(40)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        [output] = llm.generate(tokens, params)
        completion = output.outputs[0]
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens + completion.token_ids])).logits[0]
        expected = logits.log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(tokens)
        for position, found in enumerate(output.prompt_logprobs[1:]):
            assert found[tokens[position + 1]].logprob == pytest.approx(
                float(expected[position, tokens[position + 1]]), abs=1e-3
            )
            assert len(found) in (2, 3), "two at the top, and the prompt's own token"
        for step, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = expected[len(tokens) - 1 + step]
            assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert found[token].rank == 1
            assert set(found) == set(row.topk(3).indices.tolist())
        total = sum(
            found[t].logprob for t, found in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)

    def test_in_chunks_and_under_preemption(self, directory: Path, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=0)
        prompts = [prompt(100, seed) for seed in range(6)]
        whole = llm.generate(prompts, params)
        with LLM(directory, kv_memory="150KiB", max_num_seqs=6, prefill_chunk=17, max_model_len=256) as small:
            pieces = small.generate(prompts, params)
            assert small.stats().num_preemptions > 0, "the pool was meant to be too small"
        for one, other in zip(whole, pieces, strict=True):
            assert [list(p or ()) for p in one.prompt_logprobs] == [
                list(p or ()) for p in other.prompt_logprobs
            ]
            for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
                assert [x.logprob for x in a.values()] == pytest.approx(
                    [x.logprob for x in b.values()], abs=1e-4
                )


class TestPreemption:
    def test_samples_without_a_seed_go_on_as_if_nothing_had_happened(self, directory: Path) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, presence_penalty=0.5)
        answers = []
        for memory, sequences in (("4MiB", 6), ("150KiB", 6)):
            with LLM(directory, kv_memory=memory, max_num_seqs=sequences, max_model_len=256, seed=4) as llm:
                answers.append(ids(llm.generate([prompt(100, seed) for seed in range(6)], params)))
                preempted = llm.stats().num_preemptions
        assert preempted > 0, "the pool was meant to be too small"
        assert answers[0] == answers[1]

    @pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
    def test_a_step_that_fails_half_way_costs_time_and_nothing_else(
        self, llm: LLM, failure: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(
            n=2, temperature=1.0, seed=5, max_tokens=12, repetition_penalty=1.2, ignore_eos=True
        )
        prompts = [prompt(n) for n in (700, 30, 5)]
        expected = ids(llm.generate(prompts, params))
        executor = llm._engine._executor
        calls, prepare = 0, executor._backend.prepare

        def prepare_to_fail(cache: PagedCache, spans: Spans) -> BackendStep:
            step = prepare(cache, spans)
            attend = step.attend

            def fails_now_and_then(layer: int, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls in (2, 9, 20):  # in the second layer, when half of the step's KVs are written
                    raise failure
                return attend(layer, q, spec)

            step.attend = fails_now_and_then  # type: ignore[method-assign]
            # Layers that are one native call never reach it: a failure comes between two of them at the earliest.
            step.whole_layers = None
            return step

        monkeypatch.setattr(executor._backend, "prepare", prepare_to_fail)
        names = [llm.submit(p, params) for p in prompts]
        finished, failures = {}, 0
        while llm.has_unfinished:
            try:
                finished |= {o.request_id: o for o in llm.step() if o.finished}
            except BaseException as error:
                assert error is failure
                failures += 1
            llm.check_integrity()
        assert failures == 3
        assert ids([finished[name] for name in names]) == expected

    @pytest.mark.parametrize("where", ["_sampler._slots.add", "_sampler.add", "_sampler.begin", "_forward"])
    def test_who_makes_steps_fail_can_be_aborted_and_tried_again_alone(
        self, llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.2, ignore_eos=True)
        prompts = [prompt(9), prompt(10), prompt(11)]
        expected = ids(llm.generate(prompts, params))
        executor = llm._engine._executor
        *owners, name = where.split(".")
        owner = executor
        for each in owners:
            owner = getattr(owner, each)
        sound, enter, slots = getattr(owner, name), executor._occupants.enter, []

        def is_faulty() -> bool:
            return any(s.prompt_len == 10 for s in llm._engine.scheduler.running)

        def fails(*args: object, **kwargs: object) -> object:
            if is_faulty() and (not name.endswith("add") or args[0] == slots[-1]):
                raise IndexError("out of range")
            return sound(*args, **kwargs)

        def enter_in_order(samplers: list[int]) -> None:
            slots[:] = [slot for slot in samplers if executor._occupants[slot].prompt_len == 10] or [-1]
            enter(samplers)

        monkeypatch.setattr(executor._occupants, "enter", enter_in_order)
        monkeypatch.setattr(owner, name, fails)
        names = [llm.submit(p, params) for p in prompts]
        with pytest.raises(IndexError):
            llm.step()
        for each in names:
            llm.abort(each)
        llm.check_integrity()
        for each in prompts[1:] + prompts[1:2]:
            answer = llm.submit(each, params)
            if len(each) == 10:
                with pytest.raises(IndexError):
                    llm.step()
                llm.abort(answer)
            while llm.has_unfinished:
                llm.step()
            llm.check_integrity()
        assert executor._sampler.nbytes == 0, "rows of penalties are given back"
        monkeypatch.undo()
        assert ids(llm.generate(prompts, params)) == expected


class TestStepByStep:
    def test_submit_and_step(self, llm: LLM) -> None:
        wanted = {llm.submit(prompt(n), GREEDY): n for n in (5, 60)}
        named = llm.submit(prompt(7), GREEDY, request_id="mine")
        assert named == "mine"
        finished = {}
        while llm.has_unfinished:
            finished |= {o.request_id: o for o in llm.step() if o.finished}
        assert set(finished) == {*wanted, "mine"}

    def test_steps_tell_once_of_those_that_ask_for_no_more(self, llm: LLM) -> None:
        quiet = llm.submit(prompt(60), GREEDY, final_only=True)
        told = llm.submit(prompt(7), GREEDY)
        outputs = []
        while llm.has_unfinished:
            outputs += llm.step()
        names = [output.request_id for output in outputs]
        assert (names.count(quiet), names.count(told)) == (1, GREEDY.max_tokens)
        [last] = [output for output in outputs if output.request_id == quiet]
        assert last.finished and [last.outputs[0].token_ids] == ids(llm.generate([prompt(60)], GREEDY))

    def test_generate_has_nothing_told_before_the_end(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[RequestOutput] = []
        step = llm._engine.step

        def watched() -> list[RequestOutput]:
            outputs = step()
            told.extend(outputs)
            return outputs

        monkeypatch.setattr(llm._engine, "step", watched)
        answers = llm.generate([prompt(5), prompt(60)], GREEDY)
        assert {o.request_id for o in told} == {o.request_id for o in answers}
        assert len(told) == 2 and all(output.finished for output in told)

    def test_what_was_asked_for_once_can_be_aborted(self, llm: LLM) -> None:
        request_id = llm.submit(prompt(30), SamplingParams(max_tokens=50, ignore_eos=True), final_only=True)
        assert llm.step() == llm.step() == []
        output = llm.abort(request_id)
        assert output is not None and len(output.outputs[0].token_ids) == 2
        assert not llm.has_unfinished

    def test_streams_side_by_side(self, llm: LLM) -> None:
        streams = [llm.stream(prompt(n), GREEDY) for n in (5, 60, 300)]
        last: dict[int, RequestOutput] = {}
        counts = [0, 0, 0]
        for _ in range(40):
            for index, stream in enumerate(streams):
                for output in [next(stream, None)]:
                    if output is not None:
                        last[index] = output
                        counts[index] += 1
        assert counts == [12, 12, 12], "one output for each token, whichever thread made the engine step"
        assert [last[i].outputs[0].token_ids for i in range(3)] == ids(
            llm.generate([prompt(n) for n in (5, 60, 300)], GREEDY)
        )

    def test_an_abandoned_stream_frees_its_blocks(self, llm: LLM) -> None:
        stream = llm.stream(prompt(100), GREEDY)
        next(stream)
        assert llm.has_unfinished
        stream.close()
        assert not llm.has_unfinished
        llm.check_integrity()

    def test_the_greater_priority_is_served_first(self) -> None:
        with LLM(kv_memory="4MiB", max_num_seqs=1, max_model_len=256) as llm:
            messages = [{"role": "user", "content": "What is the pass key?"}]
            ways: list[Any] = [(llm.submit, "What is it?"), (llm.submit_chat, messages)]
            for submit, asked in ways:
                names = [submit(asked, GREEDY, priority=p, final_only=True) for p in (0, -3, 7, 0, 7)]
                finished = []
                while llm.has_unfinished:
                    finished += [output.request_id for output in llm.step()]
                assert finished == [names[i] for i in (2, 4, 0, 3, 1)]
                with pytest.raises(InvalidRequestError, match="priority must be an integer, got 'high'"):
                    submit(asked, GREEDY, priority="high")
                assert not llm.has_unfinished

    def test_abort(self, llm: LLM) -> None:
        request_id = llm.submit(prompt(30), SamplingParams(n=3, max_tokens=50, ignore_eos=True))
        llm.step()
        output = llm.abort(request_id)
        assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
        assert llm.abort(request_id) is None
        assert not llm.has_unfinished
        llm.check_integrity()


class TestBadInput:
    @pytest.mark.parametrize(
        ("bad", "params", "error", "message"),
        [
            ([], None, InvalidRequestError, "prompt must hold at least 1 token"),
            ([5, 97], None, InvalidRequestError, "token ids must be between 0 and 96, got 97"),
            ([5, -1], None, InvalidRequestError, "token ids must be between 0 and 96, got -1"),
            ([3] * 4096, None, ContextLengthError, r"context of 4096 tokens \(max_model_len\), got 4096"),
            ("text", None, InvalidRequestError, "no tokenizer"),
            ([1.5], None, InvalidRequestError, "must be text or a list of token ids"),
            ([5], SamplingParams(stop_token_ids=[97]), InvalidRequestError, "stop_token_ids.*97"),
        ],
    )
    def test_is_named_and_disturbs_no_other(
        self, llm: LLM, bad: list[int], params: SamplingParams, error: type[Exception], message: str
    ) -> None:
        running = llm.submit(prompt(20), GREEDY)
        with pytest.raises(error, match=message):
            llm.submit(bad, params)
        outputs = []
        while llm.has_unfinished:
            outputs = llm.step()
        assert [o.request_id for o in outputs] == [running]
        assert ids(outputs) == ids(llm.generate(prompt(20), GREEDY))

    def test_one_bad_prompt_of_many_is_named_and_leaves_nothing_behind(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: prompt token ids must be between"):
            llm.generate([prompt(5), [999]], GREEDY)
        assert not llm.has_unfinished

    def test_what_can_never_fit_is_refused_at_submission(self, directory: Path) -> None:
        with LLM(directory, kv_memory="300KiB", max_num_seqs=2) as small:
            with pytest.raises(
                CapacityError, match=r"needs room for 3009 KVs a row, kv_memory 300\.0 KiB holds \d+"
            ):
                small.submit(prompt(3000), SamplingParams(max_tokens=10))
            with pytest.raises(CapacityError, match="max_tokens 4000"):
                small.submit(prompt(50), SamplingParams(max_tokens=4000))
            # without a wish of its own an answer takes what there is
            output = small.generate(
                prompt(50), SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
            )[0]
            assert 0 < len(output.outputs[0].token_ids) < 4000

    def test_options(self, directory: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"unknown option 'kv_memroy'; did you mean kv_memory\? Known: "
        ):
            LLM(directory, kv_memroy="1GiB")
        with pytest.raises(ConfigError, match="kv_memory must be a size such as 512MiB"):
            LLM(directory, kv_memory="much")
        with pytest.raises(ConfigError, match=r"kv_memory must be at least .* got 1\.0 KiB"):
            LLM(directory, kv_memory=1024)
        with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least max_num_seqs"):
            LLM(directory, max_num_seqs=100, max_num_batched_tokens=99)
        with pytest.raises(ConfigError, match="device 'cuda:99' is not usable here"):
            LLM(directory, device="cuda:99")


class TestMemory:
    def test_the_promise_holds_with_60_requests_in_a_pool_that_fits_three(self, directory: Path) -> None:
        """Peak KV bytes from the tensors, after every step."""
        budget = 1_680_000  # blocks of three sequences of 3,030 tokens take 1,459,200 bytes
        rng = random.Random(5)
        lengths = [rng.choice((rng.randint(50, 400), rng.randint(50, 3000))) for _ in range(60)]
        with LLM(directory, kv_memory=budget, dtype="bfloat16", max_num_seqs=32) as llm:
            executor = llm._engine._executor
            ledger, pool = llm._engine.scheduler.ledger, executor.cache.pool
            assert ledger.nbytes + executor.cache.nbytes <= budget, "all that is ever allocated"
            assert 3 <= ledger.size.num_blocks // ledger.layout.blocks_for(3030) < 4
            for index, length in enumerate(lengths):
                llm.submit(prompt(length), SamplingParams(max_tokens=rng.randint(1, 30), seed=index))
            tensors = [pool.of_layer(-1).k.data_ptr(), pool.of_layer(-1).v.data_ptr()]
            finished = 0
            while llm.has_unfinished:
                finished += sum(output.finished for output in llm.step())
                assert llm.stats().kv_bytes_used <= budget
            assert finished == 60
            assert [pool.of_layer(-1).k.data_ptr(), pool.of_layer(-1).v.data_ptr()] == tensors, (
                "the pool was replaced"
            )
            assert 0.8 * budget < llm.stats().kv_bytes_peak <= budget
            llm.check_integrity()

    def test_deleting_frees(self, directory: Path) -> None:
        llm = LLM(directory, kv_memory="4MiB")
        llm.generate(prompt(20), GREEDY)
        pool = weakref.ref(llm._engine._executor.cache.pool.of_layer(-1).k)
        weights = weakref.ref(llm._engine._executor._model.model.get_input_embeddings().weight)
        del llm
        gc.collect()
        end = time.monotonic() + 10  # of the engine's thread, which lets go of its last step
        while (pool() is not None or weights() is not None) and time.monotonic() < end:
            time.sleep(0.01)
        assert pool() is None
        assert weights() is None

    def test_no_signal_handlers_are_set(self, directory: Path) -> None:
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        with LLM(directory, kv_memory="4MiB") as llm:
            llm.generate(prompt(5), GREEDY)
            assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before

    def test_samples_share_the_prompts_blocks(self, directory: Path) -> None:
        with LLM(directory, kv_memory="4MiB") as llm:
            llm.generate(prompt(1600), SamplingParams(max_tokens=16, ignore_eos=True))
            alone = llm._engine.scheduler.ledger.peak_blocks
            llm.generate(prompt(1600), SamplingParams(n=8, max_tokens=16, ignore_eos=True))
            assert llm._engine.scheduler.ledger.peak_blocks - alone == 7 * 4, (
                "a block a row for each further sample"
            )


def test_prefixes_use_memory_beyond_what_running_sequences_can_fill(directory: Path) -> None:
    first, second = prompt(49, seed=1), prompt(49, seed=2)
    with LLM(directory, kv_memory="4MiB", max_num_seqs=1, max_model_len=64) as llm:
        llm.generate([first, second], GREEDY)
        (again,) = llm.generate([first], GREEDY)
    assert again.num_cached_tokens == 48
