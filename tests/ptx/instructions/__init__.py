"""Tests of what instructions mean in the PTX machine."""
