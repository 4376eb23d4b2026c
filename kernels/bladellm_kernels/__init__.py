"""The operator library: one operator a file, with a plain PyTorch reference. Imports nothing of the runtime."""
