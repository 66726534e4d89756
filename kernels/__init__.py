"""Triton kernels. They know no torch; the op files of `bahdanau_fast` call them."""
