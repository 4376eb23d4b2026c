"""`blade_llm eval`: perplexity of a model, and how far it is from a baseline."""
