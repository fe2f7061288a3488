"""Measurements that need a checkout; none of this is in the wheel."""
