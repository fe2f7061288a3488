"""The OpenAI API over HTTP: an ASGI app in front of one engine.

One thread owns the engine (`async_engine`); requests are checked, tokenised and counted against limits before they
reach it, and outputs come back as deltas. The forms of requests and responses are `winnow.openai`'s.
"""
