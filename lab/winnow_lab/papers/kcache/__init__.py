"""KCache (arXiv 2404.18057): values of upper layers apart from their keys, and the N that weigh most read."""
