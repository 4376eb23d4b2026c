"""A model over several ranks: what each of them holds, and how they work together."""
