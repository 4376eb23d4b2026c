"""The checks, in the order of the report."""

from bladellm_runtime.errors import ConfigError
from bladellm_tools.check.args import CheckArgs
from bladellm_tools.flags import nearest

HOST_CHECKS = {
    "check_shm": "bladellm_tools.check.host:check_shm",
    "check_pb_env": "bladellm_tools.check.host:check_pb_env",
    "check_versions": "bladellm_tools.check.versions:check_versions",
    "check_memory": "bladellm_tools.check.limits:check_memory",
    "check_cgroup": "bladellm_tools.check.limits:check_cgroup",
    "check_ulimit": "bladellm_tools.check.host:check_ulimit",
    "check_disk": "bladellm_tools.check.host:check_disk",
    "check_port": "bladellm_tools.check.host:check_port",
}
GPU_CHECKS = {
    "check_gpu_visible": "bladellm_tools.check.gpu:check_gpu_visible",
    "check_driver_cuda": "bladellm_tools.check.gpu:check_driver_cuda",
    "check_gpu_free_memory": "bladellm_tools.check.gpu:check_gpu_free_memory",
    "check_flops_diff": "bladellm_tools.check.gpu:check_flops_diff",
}
MODEL_CHECKS = {"check_model": "bladellm_tools.check.model:check_model"}
CHECKS = {**HOST_CHECKS, **GPU_CHECKS, **MODEL_CHECKS}


def chosen(args: CheckArgs) -> list[str]:
    """The checks to run: --only less --skip; check_model where there is a --model.

    Raises `ConfigError` for a name that is no check, and when nothing is left.
    """
    only = [full_name(name) for name in args.only]
    skip = [full_name(name) for name in args.skip]
    if args.model is None and "check_model" in only:
        raise ConfigError("--only check_model needs --model FOLDER")
    names = [name for name in CHECKS if (not only or name in only) and name not in skip]
    names = [name for name in names if name != "check_model" or args.model is not None]
    if not names:
        raise ConfigError("--only and --skip leave no check to run")
    return names


def full_name(name: str) -> str:
    """A check's name; the prefix `check_` may be left out."""
    full = name if name.startswith("check_") else f"check_{name}"
    if full not in CHECKS:
        close = nearest(full, CHECKS)
        raise ConfigError(
            f"unknown check {name!r}; " + (f"did you mean {close}?" if close else f"known: {', '.join(CHECKS)}")
        )
    return full
