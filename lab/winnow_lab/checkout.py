"""Where the checkout lies: studies read its prompts, run its scripts and write its pages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
