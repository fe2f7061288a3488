"""Requests from arrival to last output: what they ask, what they have, what is reported."""
