"""Guided decoding: what a constraint is, and which tokens it allows next. Imports no torch."""
