"""Studies of answers: the same across kernels and model classes, and what policies and formats cost."""
