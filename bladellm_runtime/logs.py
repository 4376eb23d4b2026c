"""Logging of our processes on standard error: their own lines from --log_level up, other libraries' from warnings."""

import logging

OWN = ("bladellm_runtime", "bladellm_tools", "bladellm_kernels")


def log_to_stderr(level: str, process: str) -> None:
    """Log with the time and the name of the process ("server", "engine") on each line; `level` is --log_level."""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {process}: %(message)s")
    # Libraries have much to say at INFO: torch its cache statistics at exit, the hub's HTTP client every request.
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    for name in OWN:
        logging.getLogger(name).setLevel(level)
