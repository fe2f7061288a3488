"""A model as its packed weights and what to do with them: it starts without transformers' model classes.

`winnow pack` writes one out of a loaded model whose every layer is fused, after trying out that both give the same
logits to the last bit. The weights stay in their file, mapped: processes share them, and Linux may drop what lies idle.
"""
