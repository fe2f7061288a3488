"""Binding of a model's layers to the paged cache, and the check that it computes the same."""
