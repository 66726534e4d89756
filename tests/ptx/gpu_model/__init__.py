"""A model of time for the GPU kernels. Whatever it gives is modelled, not measured.

Counts of real launches in the PTX machine (counted.py) become times on GPUs that are not here
(times.py), beside the least that others take (__main__.py). What to expect of it: within a factor
of 1.5 for kernels bound by DRAM or by a unit, of 2 for those bound by latency; the order of two
kernels is more certain than either. Instructions are those of ptxas's machine code (sass.py); how
often they run follows from the PTX that ran. There is no L1, and launches of a call do not overlap.
"""
