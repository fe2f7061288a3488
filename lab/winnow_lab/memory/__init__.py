"""How much memory is taken, and what it holds."""
