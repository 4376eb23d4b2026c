"""Model families: a data description each, one decoder class for all, and the loading of checkpoints."""
