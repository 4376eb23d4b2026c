"""The HTTP server: OpenAI protocol, streaming, limits, metrics, errors."""
