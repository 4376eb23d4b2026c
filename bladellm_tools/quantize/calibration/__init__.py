"""Calibration text, from files, the hub or built in, as windows of tokens."""
