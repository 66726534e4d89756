"""Additive attention in graphs of torch's functions: found, proved, made one operator."""
