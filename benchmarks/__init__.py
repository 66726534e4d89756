"""How fast ours is: a tool of a checkout, no part of the wheel.

``python -m benchmarks`` (``make bench``) measures the tables, ``python -m benchmarks.compare BASE``
(``make bench-compare``) two versions, ``benchmarks.gpu_report`` (``make gpu-report``) a GPU and
what a user feels, on a processor too, ``benchmarks.gpu.hour`` (``make gpu-hour``) what decides a
GPU's constants. How a row is timed, in the order of reading:
``cases`` (the rows and their tensors), ``contestants.registry`` (who computes),
``contestants.parity`` (the check before the timing), ``measure`` (calls in turns), ``__main__`` (a
row). ``page`` writes docs/performance.md and the tables of README and docs/gpu.md from ``results``.
"""
