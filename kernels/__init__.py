"""Triton kernels, without torch; `bahdanau_fast.backends.triton` launches them."""
