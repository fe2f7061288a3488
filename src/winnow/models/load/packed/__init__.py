"""Packed models on disk: written, read, and kept in the user's cache folder."""
