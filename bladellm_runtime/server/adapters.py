"""The LoRA adapters that requests may name, and the folders that they stand for."""

import asyncio
import posixpath
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.lora.names import Adapter, AdapterNames, parse_modules
from bladellm_runtime.server.errors import ApiError, model_not_found
from bladellm_runtime.server.limits import RETRY_SECONDS
from bladellm_runtime.server.named_adapters import NamedAdapter, NamedAdapters

T = TypeVar("T")
FOUND_SECONDS = 2.0
"""How long a path is known to be a folder without another look."""
MAX_FOUND = 1024
LOOK_SECONDS = 10.0
"""How long a look at the folder of adapters may take, waiting for others included."""
LOOKERS = 2


class Adapters:
    """Finds the adapter that the model of a request is, if it is not the base model.

    Looks at folders in threads of its own: a file system that hangs holds up neither the event loop nor tokenizing.
    """

    def __init__(self, base_names: Sequence[str], named: NamedAdapters, root: Path | None) -> None:
        self._base_names = base_names
        self._named = named
        self._paths = AdapterNames({}, root)
        self._found: OrderedDict[str, tuple[Adapter, float]] = OrderedDict()
        self._threads = ThreadPoolExecutor(LOOKERS, thread_name_prefix="adapters")

    @property
    def named(self) -> NamedAdapters:
        """Those with a name of their own."""
        return self._named

    async def find(self, model: str) -> Adapter | None:
        """The adapter that a request names; None for the base model. Raises `ApiError` 404 for unknown names and for
        paths that lead out of the root, and 503 where the file system does not answer."""
        if model in self._base_names:
            return None
        named = self._named.current().get(model)
        if named is not None:
            return Adapter(model, Path(named.folder))
        found = self._found.get(model)
        if found is not None and time.monotonic() < found[1]:
            return found[0]
        return await self._look(model)

    async def folder_of(self, path: str) -> Path | None:
        """The folder at a path below the root; None where there is none.

        Raises `ParameterError` for paths that lead out of the root, and `ApiError` 503 where the file system does not
        answer.
        """
        adapter = await self._in_thread(self._paths.find, path)
        return None if adapter is None else adapter.folder

    def root_of(self, folder: str) -> str:
        """What clients are told of a folder: its path below the root, else its name alone."""
        root = self._paths.root
        inside = root is not None and root in Path(folder).parents
        return str(Path(folder).relative_to(root)) if inside and root is not None else Path(folder).name

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look(self, model: str) -> Adapter:
        # One spelling a folder, so that metrics have no more names than there are folders. Whoever may give whole paths
        # could ask which folders there are elsewhere.
        if self._paths.root is None or model.startswith("/") or posixpath.normpath(model) != model:
            raise model_not_found(model)
        try:
            adapter = await self._in_thread(self._paths.find, model)
        except ParameterError as error:
            raise ApiError(404, str(error), param=error.param, code=error.code) from None
        if adapter is None:
            raise model_not_found(model)
        self._remember(adapter)
        return adapter

    def _remember(self, adapter: Adapter) -> None:
        self._found[adapter.name] = adapter, time.monotonic() + FOUND_SECONDS
        self._found.move_to_end(adapter.name)
        if len(self._found) > MAX_FOUND:
            self._found.popitem(last=False)

    async def _in_thread(self, look: Callable[[str], T], path: str) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, look, path)
        try:
            # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that comes as the work ends.
            async with asyncio.timeout(LOOK_SECONDS):
                return await future
        except TimeoutError:
            raise ApiError(
                503,
                "The folder of adapters does not answer; try again later",
                code="adapter_folder_stuck",
                retry_after=RETRY_SECONDS,
            ) from None


def make_adapters(args: ServingArgs, base_names: Sequence[str], log: Path | None) -> Adapters:
    """The adapters of --lora_modules and --lora_dir. log: the file of changes that front ends share, if several.

    Raises `ConfigError` for flags that need others, folders that are not there, and names that cannot be used.
    """
    _check_flags(args)
    root = None if args.lora_dir is None else Path(args.lora_dir)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--lora_dir {root} is not a folder")
    modules = AdapterNames(parse_modules(args.lora_modules), root).modules
    for name in modules:
        if name in base_names:
            raise ConfigError(f"--lora_modules names {name!r:.120}, which is the model's name; give it another one")
    now = int(time.time())
    named = {name: NamedAdapter(name, str(folder), now) for name, folder in modules.items()}
    return Adapters(base_names, NamedAdapters(named, log), root)


def _check_flags(args: ServingArgs) -> None:
    for name in ("lora_dir", "lora_modules", "admin_api_key_file"):
        if getattr(args, name) and not args.enable_lora:
            raise ConfigError(f"--{name} is for LoRA adapters; add --enable_lora, or leave it out")
    if args.admin_api_key_file is not None and args.lora_dir is None:
        raise ConfigError(
            "--admin_api_key_file opens the routes that load adapters from below --lora_dir; set --lora_dir too"
        )
