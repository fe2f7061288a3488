"""The OpenAI API over HTTP: an ASGI app in front of one engine, which one thread owns (`async_engine`). Requests are
checked, tokenised and counted against limits before they reach it, and outputs come back as deltas.
"""
