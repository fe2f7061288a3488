"""Reports: tables, plots, journals, fingerprints and provenance."""
