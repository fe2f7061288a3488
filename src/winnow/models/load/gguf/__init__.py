"""A model in one GGUF file: its header, what its keys mean, and how transformers reads the rest."""
