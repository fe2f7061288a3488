"""WHEN: requests, the scheduler, and the step."""
