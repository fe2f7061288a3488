"""Decoder layers in a few native passes, wherever they compute what transformers' own layer computes."""
