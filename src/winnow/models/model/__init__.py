"""What is said of a model, and its weights, before any layer is bound: kinds, geometry, tokens, blocks of codes."""
