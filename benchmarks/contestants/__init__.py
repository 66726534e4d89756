"""Who computes: this package, its baselines and other libraries, and the parity check."""
