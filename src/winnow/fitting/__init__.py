"""Learning, on this machine, what a replay of KVzip would say: collect its scores, fit a predictor, judge it."""
