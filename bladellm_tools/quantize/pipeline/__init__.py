"""From a float model on disk to a quantized one, decoder layer by decoder layer."""
