"""Results of a simulation: journal, live view, summary, plots and the run directory."""
