"""BATON, section 5: two sets of queries through the padded engine's four modes, and through the paged engine."""
