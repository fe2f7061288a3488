"""Prompts: as callers write them, as messages of a conversation, and as templates make text of these."""
