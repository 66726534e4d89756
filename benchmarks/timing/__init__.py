"""How time is taken: in turns, in processes, and what a difference means."""
