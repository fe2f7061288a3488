"""Answers to the paths of the API."""
