"""Settings that hold for every test."""

from hypothesis import HealthCheck, settings

# Timing on shared machines says nothing about correctness, so no example has a deadline.
settings.register_profile("winnow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("winnow")
