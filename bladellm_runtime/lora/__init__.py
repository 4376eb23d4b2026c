"""Adapters: found by name, read from PEFT folders, kept on the host and moved to slots of the device."""
