"""How fast single parts are, beside the limits of the machine."""
