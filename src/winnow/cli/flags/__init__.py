"""Flags: their words, types and places in `--help`."""
