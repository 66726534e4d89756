"""What ``make fuzz`` runs: cases of the C++ entry points, made of bytes."""
