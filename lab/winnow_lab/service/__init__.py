"""How a server behaves under load, and for hours."""
