"""Operators for scores with features or another activation inside."""
