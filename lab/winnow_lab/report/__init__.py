"""Tables, plots and the console."""
