"""The folder that a tool is to make of a model: what can be known of it before any work."""

from pathlib import Path

from bladellm_runtime.errors import ConfigError

_PARTIAL = ".partial"


def partial_folder(output: Path) -> Path:
    """What takes the place of `output` once it is finished."""
    return output.with_name(output.name + _PARTIAL)


def check_new_folder(output: Path, model: Path) -> None:
    """Raise `ConfigError` unless a finished folder can take the place of `output`, or of what that is a link to."""
    try:
        _check(output, model)
        partial_folder(output).exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--output_dir {str(output)!r:.80} cannot be used ({reason}); give another one") from error


def _check(output: Path, model: Path) -> None:
    home, source = output.resolve(), model.resolve()
    if home == source or source in home.parents:
        raise ConfigError(f"--output_dir {output} is in the model's own folder; give a folder outside of it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        what = "is not empty" if output.is_dir() else "is a file"
        raise ConfigError(f"--output_dir {output} {what}; give a folder that is empty or does not exist")
    if home.is_mount():
        raise ConfigError(f"--output_dir {output} is a mount point, which cannot be replaced; give a folder in it")
