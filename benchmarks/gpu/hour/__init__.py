"""``make gpu-hour``: nine minutes on a GPU that is there once, most telling experiments first.

``runner`` gives each experiment a process and a limit; ``plan`` has them in order, ``constants``
those that decide a constant, as data; ``whole`` what tests and users run; ``lab`` times a call
while a constant varies. ``benchmarks.gpu.decide`` reads what they wrote.
"""
