"""Studies of servers under load, and for hours."""
