"""What ``fuzz.py`` runs: cases of the C++ entry points, made of bytes."""
