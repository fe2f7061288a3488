"""How much of a real model's accuracy each policy keeps: `python -m winnow_lab.real`."""
