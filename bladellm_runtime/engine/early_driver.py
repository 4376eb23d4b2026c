"""Opens the CUDA driver while torch is still being imported: each takes seconds, and neither needs the other.

Nothing here imports torch. What goes wrong is left for torch to say, which opens the driver in any case.
"""

import ctypes
import importlib.util
import threading
from pathlib import Path

from bladellm_runtime.config import Device

LIBRARY = "libcuda.so.1"


def open_early(device: Device) -> threading.Thread | None:
    """Begin to open the driver and the context of the first GPU, in a thread that is returned; None where torch is to
    run on a CPU, or can do nothing else."""
    if device == "cpu" or not torch_has_cuda():
        return None
    thread = threading.Thread(target=open_driver, name="cuda-driver", daemon=True)
    thread.start()
    return thread


def torch_has_cuda() -> bool:
    """Whether the torch that is installed is one for CUDA: another would leave a context that it never uses."""
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


def open_driver() -> None:
    """Make the first GPU's primary context, the one that torch uses; it stays for the life of the process."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
