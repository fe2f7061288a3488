"""Accounting of the cache in host arithmetic: the ledger, and what it consists of. Imports no torch."""
