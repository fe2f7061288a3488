"""Search for policy, compression and batch that keep a stated agreement with the full cache on one's own prompts."""
