"""Benchmarks: one list of shapes, one provider table, parity before time."""
