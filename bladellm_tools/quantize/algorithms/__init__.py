"""Rounding and smoothing: one algorithm a file, and what they share."""
