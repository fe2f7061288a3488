"""Scheduling: who takes part in a step, and with how many tokens."""
