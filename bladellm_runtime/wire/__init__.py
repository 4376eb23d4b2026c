"""Messages between the HTTP process and the engine process, and what carries them. Imports no torch, uses no pickle."""
