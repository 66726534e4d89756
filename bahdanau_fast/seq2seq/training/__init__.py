"""Training: one batch, a whole run, several processes."""
