"""Events of the prefix cache: what a router learns from them alone, and how they are sent."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.cache.accounting.prefix_chain import PrefixRemoved, PrefixStored
from winnow.errors import ConfigError
from winnow_events import KVEventPublisher

BLOCK = 16
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


# As a consumer reads them: vllm/distributed/kv_events.py.
class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """Base of what a batch holds."""


class BlockStored(Event):
    """Blocks that are there now."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    """Blocks that are gone."""

    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(Event):
    """All are gone."""


class Batch(msgspec.Struct, omit_defaults=True):
    """One message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """The view of one server that its events give."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self.place_of: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored) and event.extra_keys == [None]:
                [name], place = event.block_hashes, (event.parent_block_hash, tuple(event.token_ids))
                self.blocks[place], self.place_of[name] = name, place
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    if name in self.place_of:
                        del self.blocks[self.place_of.pop(name)]

    def num_known(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt, in whole blocks, that the server has; the last one is always computed."""
        parent, known = None, 0
        while known + BLOCK < len(prompt):
            found = self.blocks.get((parent, tuple(prompt[known : known + BLOCK])))
            if found is None:
                break
            parent, known = found, known + BLOCK
        return known


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    found = KVEventPublisher("inproc://events", "inproc://replay", "kv", None)
    yield found
    found.close()


def replayed(start: int) -> list[tuple[int, list[Event]]]:
    """All batches from a number on."""
    # It takes many answers to one question, which a REQ socket does not.
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect("inproc://replay")
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    try:
        while dealer.poll(5000):
            _, number, payload = dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch).events))
        raise AssertionError("the end did not come")
    finally:
        dealer.close(linger=0)


def test_routers_that_read_events_alone_know_what_servers_hold(tmp_path: Path) -> None:
    """Over three servers with little memory, beside one with all of it; prompts share documents."""
    drawn = random.Random(0)
    documents = [[drawn.randrange(3, VOCAB) for _ in range(drawn.randrange(20, 90))] for _ in range(18)]
    save_tiny_llama(tmp_path, seed=0)
    options = {"max_num_seqs": 8, "block_size": BLOCK, "max_model_len": 256}
    servers = [LLM(tmp_path, kv_memory="192KiB", **options) for _ in range(3)]
    large = LLM(tmp_path, kv_memory="576KiB", **options)
    routers, sender = [Router() for _ in servers], KVEventPublisher("inproc://routed", None, "", None)
    computed = computed_by_large = forgotten = 0
    for server in servers:
        server.record_prefixes()
    for _ in range(400):
        prompt = drawn.choice(documents) + [drawn.randrange(3, VOCAB) for _ in range(drawn.randrange(1, 40))]
        foreseen = [router.num_known(prompt) for router in routers]
        at = max(range(3), key=lambda each: (foreseen[each], -len(routers[each].blocks)))
        [output] = servers[at].generate([prompt], ONE_TOKEN)
        # The index finds the first tokens of a further block too.
        assert output.num_cached_tokens // BLOCK * BLOCK == foreseen[at]
        computed += len(prompt) - output.num_cached_tokens
        [output] = large.generate([prompt], ONE_TOKEN)
        computed_by_large += len(prompt) - output.num_cached_tokens
        events = servers[at].take_prefix_events()
        forgotten += sum(isinstance(event, PrefixRemoved) for event in events)
        wire = msgspec.msgpack.encode({"ts": 0.0, "events": [sender._form(event) for event in events]})
        routers[at].read(msgspec.msgpack.decode(wire, type=Batch).events)
    assert forgotten > 300, "memory was never short"
    assert computed <= 1.1 * computed_by_large
    sender.close()
    large.close()
    for server in servers:
        server.check_integrity()
        server.reset_prefix_cache()
        removed = [event for event in server.take_prefix_events() if isinstance(event, PrefixRemoved)]
        assert len(removed) == len(routers[servers.index(server)].place_of)
        server.close()


def test_a_compressed_prefix_is_never_taken_for_a_full_one() -> None:
    with LLM(kv_memory="8MiB", block_size=BLOCK, eviction="snapkv", compression=4, max_num_seqs=2) as llm:
        llm.record_prefixes()
        prompt = list(range(3, 203))
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, context_tokens=160))
        events = llm.take_prefix_events()
    compressed = [event for event in events if isinstance(event, PrefixStored) and event.rule is not None]
    assert compressed, "a round leaves a snapshot"
    sender, router = KVEventPublisher("inproc://compressed", None, "", "int8"), Router()
    forms = [sender._form(event) for event in compressed]
    sender.close()
    assert all(any(key.startswith("compressed=") for key in form["extra_keys"][0]) for form in forms)
    assert all("kv_cache_dtype=int8" in form["extra_keys"][0] for form in forms)
    router.read(
        msgspec.msgpack.decode(msgspec.msgpack.encode({"ts": 0.0, "events": forms}), type=Batch).events
    )
    assert router.num_known(prompt) == 0


def test_events_arrive_in_order_and_can_be_asked_for_again(publisher: KVEventPublisher) -> None:
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.connect("inproc://events")
    listener.subscribe(b"kv")
    first = PrefixStored(b"a" * 32, None, tuple(range(BLOCK)), salt="gold")
    second = PrefixStored(b"b" * 32, first.key, tuple(range(BLOCK, 2 * BLOCK)), salt="gold")
    publisher.publish([first, second])
    publisher.publish([])
    publisher.publish([PrefixRemoved(second.key)])
    found = []
    for number in range(2):
        assert listener.poll(5000)
        topic, name, payload = listener.recv_multipart()
        assert (topic, int.from_bytes(name, "big")) == (b"kv", number)
        found.append(msgspec.msgpack.decode(payload, type=Batch))
    listener.close(linger=0)
    stored = found[0].events
    assert [event.parent_block_hash for event in stored if isinstance(event, BlockStored)] == [
        None,
        first.key,
    ]
    assert stored[0].extra_keys == [("cache_salt=gold",)] and stored[0].block_size == BLOCK
    assert found[1].events == [BlockRemoved([second.key], "GPU")]
    assert replayed(0) == [(number, batch.events) for number, batch in enumerate(found)]
    assert replayed(1) == [(1, found[1].events)]


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_events_endpoint must be a ZeroMQ address .* got 'nowhere'"):
        KVEventPublisher("nowhere", None, "", None)
