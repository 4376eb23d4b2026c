"""The commands: flags in, calls into the runtime out."""
