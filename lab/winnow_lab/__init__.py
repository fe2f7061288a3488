"""What measures Winnow and plans with it: `python -m winnow_lab` lists the studies."""
