"""On paper: tables, plots, the files that a run resumes from, and where a number was measured."""
