"""Publisher of KV events in vLLM's wire form, from which routers learn which server holds which prefix.

A message has three parts: the topic, the batch's number (8 bytes, big-endian) and the batch in msgpack. Whoever missed
some asks at the replay address for all from a number on; the last reply has the number -1 and no batch. Source of the
form: `vllm/distributed/kv_events.py`.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from winnow.cache.accounting.prefix_chain import PrefixEvent, PrefixRemoved, PrefixStored
from winnow.errors import ConfigError
from winnow.eviction import SequenceEviction

log = logging.getLogger("winnow.server")

MEDIUM = "GPU"
"""Name that vLLM gives the memory that an engine computes from, whatever the device."""
_KEPT = 10_000
"""Batches that can be asked for again."""
_END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.1


class KVEventPublisher:
    """Sender of batches of events, on a thread of its own. Raises ConfigError: an address cannot be bound.

    `kv_cache_dtype` None: KVs are stored as the model computes them.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, kv_cache_dtype: str | None
    ) -> None:
        self._topic = topic.encode()
        self._kv_cache_dtype = kv_cache_dtype
        self._queue: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)
        context: zmq.Context[Any] = zmq.Context.instance()
        self._sender = _bound(context, zmq.PUB, endpoint, "kv_events_endpoint")
        self._replayer = (
            None
            if replay_endpoint is None
            else _bound(context, zmq.ROUTER, replay_endpoint, "kv_events_replay_endpoint")
        )
        self._thread = threading.Thread(target=self._run, name="winnow-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[PrefixEvent]) -> None:
        """Send events as one batch, from the thread."""
        if events:
            self._queue.put([self._form(event) for event in events])

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _form(self, event: PrefixEvent) -> dict[str, Any]:
        if isinstance(event, PrefixRemoved):
            return {"type": "BlockRemoved", "block_hashes": [event.key], "medium": MEDIUM}
        return {
            "type": "BlockStored",
            "block_hashes": [event.key],
            "parent_block_hash": event.before,
            "token_ids": event.token_ids,
            "block_size": len(event.token_ids),
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "extra_keys": [self._extra_keys(event)],
        }

    def _extra_keys(self, event: PrefixStored) -> list[str] | None:
        keys = [f"cache_salt={event.salt}"] if event.salt else []
        if self._kv_cache_dtype is not None:
            keys.append(f"kv_cache_dtype={self._kv_cache_dtype}")
        rule = event.rule
        if isinstance(rule, SequenceEviction):
            keys.append(f"compressed={rule.target}/{rule.context_len}")
            keys.append(f"policy={type(rule.policy.score).__name__}/{type(rule.policy.budget).__name__}")
        return keys or None

    def _run(self) -> None:
        encoder, number = msgspec.msgpack.Encoder(), 0
        while True:
            self._answer_replays()
            try:
                events = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if events is None:
                break
            batch = encoder.encode({"ts": time.time(), "events": events, "data_parallel_rank": 0})
            name, number = number.to_bytes(8, "big"), number + 1
            self._sender.send_multipart((self._topic, name, batch))
            self._kept.append((name, batch))
        for socket in filter(None, (self._sender, self._replayer)):
            socket.close(linger=1000)

    def _answer_replays(self) -> None:
        while self._replayer is not None and self._replayer.poll(0):
            asked = self._replayer.recv_multipart()
            if len(asked) != 3 or len(asked[2]) != 8:
                log.warning(
                    "a request for KV events must be 8 bytes behind an empty part, got %d parts", len(asked)
                )
                continue
            for name, batch in self._kept:
                if name >= asked[2]:
                    self._replayer.send_multipart((asked[0], b"", name, batch))
            self._replayer.send_multipart((asked[0], b"", _END, b""))


def _bound(context: "zmq.Context[Any]", kind: int, endpoint: str, name: str) -> "zmq.Socket[Any]":
    socket = context.socket(kind)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(
            f"{name} must be a ZeroMQ address that can be bound, got {endpoint!r}: {error}"
        ) from error
    return socket
