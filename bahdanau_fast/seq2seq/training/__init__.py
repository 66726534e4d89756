"""Training: one batch, a whole run, several processes, and the comparison with eager attention."""
