"""HOW FAST: the machine's limits, the attention operations beside them, and fixed work through the engine."""
