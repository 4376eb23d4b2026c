"""BladeLLM Open's runtime: one engine behind every command."""

__version__ = "0.1.0"
