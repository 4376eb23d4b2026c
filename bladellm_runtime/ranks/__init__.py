"""The ranks besides the first: their processes, what rank 0 tells them, and whether they are well. Imports no torch."""
