"""The commands ``demo``, ``train``, ``translate``, ``evaluate`` and ``plot``, and their figures."""
