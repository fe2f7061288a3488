"""Studies of memory: blocks, prefixes, admission, and the process itself."""
