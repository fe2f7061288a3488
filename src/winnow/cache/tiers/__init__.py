"""Tiers beside the device: copies of sequences, and values or KVs of some layers."""
