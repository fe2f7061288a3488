"""HOW MUCH: what a model needs on which hardware, how fast it is there, and a simulator of the engine.

Arithmetic over shapes and the engine's own host objects: no weights are read, and nothing is computed by a model.
"""
