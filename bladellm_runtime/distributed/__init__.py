"""Models over several processes: who holds what, what the ranks do together, and what rank 0 tells the others."""
