"""Search for the policy, compression and batch that keep a stated agreement with the full cache on a user's own
prompts.
"""
