"""Path of the repository checkout, which holds prompts, scripts and result pages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
