"""Results of an evaluation as text."""
