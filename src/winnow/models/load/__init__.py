"""From a directory, a file or a name to a model in memory."""
