"""Fit of a predictor of KVzip's scores: collect scores of replays, train, evaluate."""
