"""The keys that the flags of a server name."""

from pathlib import Path

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import ConfigError


def read_api_keys(args: ServingArgs) -> list[str]:
    """The keys of --api_key and --api_key_file. Raises `ConfigError` when the file cannot be read or is empty."""
    keys = args.api_key + _read_keys("api_key_file", args.api_key_file)
    if any(not key for key in keys):
        raise ConfigError("--api_key must not be empty")
    return keys


def read_admin_keys(args: ServingArgs) -> list[str]:
    """The keys of --admin_api_key_file. Raises `ConfigError` when the file cannot be read or is empty."""
    return _read_keys("admin_api_key_file", args.admin_api_key_file)


def _read_keys(flag_name: str, path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text().split("\n")
    except OSError as error:
        raise ConfigError(f"--{flag_name} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--{flag_name} {path} is not UTF-8 text; write one key a line") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--{flag_name} {path} holds no key; write one a line")
    return keys
