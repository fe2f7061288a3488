"""Faster forms of layers, each taken where a trial finds that it computes the same."""
