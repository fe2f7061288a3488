"""Output of commands to a terminal: banners, progress, summaries."""
