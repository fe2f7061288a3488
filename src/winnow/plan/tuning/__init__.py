"""Which policy, compression and batch keep a stated agreement with the full cache on a user's own prompts."""
