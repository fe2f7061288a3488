"""Eviction policies head to head, each beside what the papers report of its method."""
