"""Greedy and beam search, translations and their scores."""
