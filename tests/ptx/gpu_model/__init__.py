"""A model of time for the GPU kernels. Whatever it gives is modelled, not measured.

Counts of real launches in the PTX machine (counted.py) become times on GPUs that are not here
(times.py), beside the least that others take (__main__.py). What to expect of it: within a factor
of 1.5 for kernels bound by DRAM or by a unit, of 2 for those bound by latency; the order of two
kernels is more certain than either. PTX is not machine code: a loop that ptxas unrolls has fewer
trips to memory than counted. There is no L1, the latency under load is the same for every kernel,
the caches hold nothing of the inputs at first, and launches of a call do not overlap.
"""
