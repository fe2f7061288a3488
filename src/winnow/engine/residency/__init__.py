"""Residency of KVs: who shares, gives way, is copied out, and comes back."""
