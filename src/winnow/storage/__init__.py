"""Prefixes outside of memory: the format of their files, and the places where these lie."""
