"""Tests of what ranks tell each other."""
