"""vLLM's words, modules and engines, for scripts that were written for it."""
