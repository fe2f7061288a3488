"""Drafts of a model's own heads, and of assistants that read its cache: `speculative_config={"method": "mtp"}`."""
