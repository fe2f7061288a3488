"""What a request may take of KVs that were computed for others."""

EXACT, DOCUMENTS, ANYWHERE = REUSES = "exact", "documents", "anywhere"
"""Prefixes alone; documents that the prompt marks, too; any run of tokens that was seen before, too."""

LIBRARY = "\0documents"
"""Tenant of documents that were computed ahead: every tenant's prompts may place them, and none begins with them."""
LIBRARY_FOLDER = ".winnow"
"""Folder of their KVs, within the folder of their texts."""
