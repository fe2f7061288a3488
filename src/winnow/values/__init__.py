"""Values that users write, parsed once, and the checks of what they give."""
