"""What a request may take of KVs that were computed for others."""

EXACT, DOCUMENTS, ANYWHERE = REUSES = "exact", "documents", "anywhere"
"""Prefixes alone; documents that the prompt marks, too; any run of tokens that was seen before, too."""
