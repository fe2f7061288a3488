"""Winnow beside NVIDIA's kvpress: the same prompts, the same number of KVs, answers scored alike, bytes beside them."""
