"""HOW a conversation that has grown too large is compressed: by a request whose round cuts its oldest turns."""

from winnow.attention import Smoothing
from winnow.cache.layout import CacheLayout
from winnow.engine.memory.session import Session
from winnow.engine.requests.new_request import NewRequest
from winnow.eviction import EvictionPolicy
from winnow.eviction.budgets import AdaptiveRows
from winnow.eviction.policy import Keep, When
from winnow.eviction.scores import Leverage
from winnow.sampling import SamplingParams
from winnow.values.session_request import SessionRequest

AGING_PRIORITY = -(2**62)
"""Behind all that clients may ask for."""
_SINKS = 4
_MOST_COMPRESSION = 8
"""Tokens of old turns per KV that stays, at most: beyond it answers suffer, and a session goes as a whole."""
_FILLED = 0.75
"""Part of its budget that a session is compressed to, so that it has room for turns to come."""
# By keys alone, which is known without any query: leverage costs no replay, and no accumulators.
_AGING = EvictionPolicy(
    Leverage(pool=Smoothing(3, "average")), AdaptiveRows(), Keep(sinks=_SINKS), When(after_prefill=True)
)


def aging_request(session: Session, layout: CacheLayout) -> NewRequest | None:
    """Return a request whose prompt is a session's tokens, all of which it finds, with a round before the last.

    None: the session cannot be compressed, or not to the `memory` that it may take.
    """
    length = len(session.token_ids)
    foreign = session.rule is not None and session.rule.policy is not None
    # The state of a recurrent layer cannot be taken back to where a round leaves off.
    fixed = layout.has_windows or layout.value_tier is not None or layout.state_bytes
    if foreign or fixed or session.memory is None:
        return None
    whole = layout.device_bytes(layout.by_kind(layout.row_blocks(layout.even_rows(layout.block_size))))
    budget = int(_FILLED * session.memory * layout.block_size / whole)
    spans = _kept_whole(session, budget)
    if spans is None:
        return None
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        eviction=_AGING,
        kv_budget=min(budget, length - 1),
        context_tokens=length - 1,
        protect=spans,
    )
    session.whole_from = spans[-1][0]
    return NewRequest(
        f"session-{session.tenant or ''}-{session.name}-{session.num_turns}",
        None,
        session.token_ids.tolist(),
        params,
        AGING_PRIORITY,
        session.tenant,
        final_only=True,
        session=SessionRequest(session.name, session.memory, ages=True, turn=session.num_turns),
        images=session.images,
    )


def _kept_whole(session: Session, budget: int) -> tuple[tuple[int, int], ...] | None:
    """Return spans that a budget, in KVs a row, leaves whole: the system prompt, and the last two turns or one.

    None: even so too little would stay of the others.
    """
    length = len(session.token_ids) - 1
    for begin in session.turns[-3:-1]:
        begin = min(max(begin, session.whole_from, session.system), length - 1)
        spans = ((0, session.system), (begin, length)) if session.system else ((begin, length),)
        protected = session.system + length - begin
        if protected + _SINKS + (length - protected) // _MOST_COMPRESSION < budget:
            return spans
    return None
