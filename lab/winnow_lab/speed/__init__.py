"""Studies of speed: single parts beside the limits of the machine."""
