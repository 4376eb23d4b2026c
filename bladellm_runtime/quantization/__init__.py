"""Quantized weights: schemes, the canonical form, and the checkpoint formats that store them."""
