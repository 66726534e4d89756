"""What a run of ``bench`` measures beside its tables."""
