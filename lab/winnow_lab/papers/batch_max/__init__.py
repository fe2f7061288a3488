"""Batch-Max's experiment (Metel et al. 2024, section 4.1) on the demo model: memory is given, the batch is free."""
