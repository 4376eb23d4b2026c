"""Run a Gluon kernel in Python, a program after the other, its asynchronous parts as late or as early as they may be.

Layouts mean nothing here. Copies to shared memory happen at once or at the wait that demands them, products of
matrices likewise: a kernel that reads a buffer before it is filled, or fills one that is still read, gives NaN or other
numbers in one of the two. Shared memory is NaN at first.
"""

import math
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

from tests.kernels.gluon_copy_engine import CopyEngine, Described
from tests.kernels.gluon_partitions import Partitions

_TO = torch.Tensor.to


@dataclass
class Pointer:
    """Elements of a tensor's storage from its first one on."""

    data: torch.Tensor
    offset: torch.Tensor | int = 0

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, other) -> "Pointer":
        return Pointer(self.data, self.offset + other)

    def __getitem__(self, places) -> "Pointer":
        return Pointer(self.data, self.offset[places])

    def to(self, dtype) -> torch.Tensor:
        """As numbers: elements from the first one on."""
        return torch.as_tensor(self.offset, dtype=dtype)

    def flat(self) -> torch.Tensor:
        size = self.data.untyped_storage().nbytes() // self.data.element_size() - self.data.storage_offset()
        return self.data.as_strided((size,), (1,))

    def load(self, mask=None, other=0.0) -> torch.Tensor:
        offset = torch.as_tensor(self.offset)
        if mask is None:
            return self.flat()[offset]
        mask = mask.expand(offset.shape)
        return torch.where(mask, self.flat()[torch.where(mask, offset, 0)], torch.tensor(other).to(self.data.dtype))

    def store(self, value, mask=None) -> None:
        offset, value = torch.as_tensor(self.offset), torch.as_tensor(value)
        mask = torch.ones(offset.shape, dtype=torch.bool) if mask is None else mask.expand(offset.shape)
        self.flat()[offset[mask]] = value.expand(offset.shape)[mask].to(self.data.dtype)

    def add(self, value) -> torch.Tensor:
        before = self.load().clone()
        self.store(before + value)
        return before


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype

    def index(self, place) -> "Shared":
        assert 0 <= int(place) < self.shape[0]
        return Shared(self.data[int(place)])

    def slice(self, start, length, dim=0) -> "Shared":
        assert int(start) + length <= self.shape[dim]
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order) -> "Shared":
        return Shared(self.data.permute(order))

    def reshape(self, shape) -> "Shared":
        return Shared(self.data.view(shape))

    def _reinterpret(self, dtype, shape, layout) -> "Shared":
        return Shared(self.data.view(dtype).view(shape))

    def store(self, value) -> None:
        self.data.copy_(value)

    def load(self, layout) -> torch.Tensor:
        return self.data.clone()


class Later:
    """Work in order, done at once or when a wait leaves fewer outstanding."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        if self.late:
            self.work.append(work)
        else:
            work()
            self.work.append(lambda: None)

    def wait(self, outstanding: int) -> None:
        while len(self.work) > outstanding:
            self.work.pop(0)()


class Machine:
    """The names that a kernel uses, for one program; copies late and products early, or the other way round."""

    def __init__(
        self, program: int | tuple[int, ...], programs: int, late_copies: bool, on_wait: Callable[[], None]
    ) -> None:
        self.program = program if isinstance(program, tuple) else (program,)
        self.programs, self.on_wait = programs, on_wait
        # Partitions that waited for the kernels before; None: the program, before it had any.
        self.waited: set[threading.Thread | None] = set()
        self.complete = False
        self.engine = CopyEngine(late_copies)
        self.assembled: list[list] = []
        self.copies = Later(late_copies)
        # Of each partition, which is a thread.
        self.products: dict[int, Later] = defaultdict(lambda: Later(not late_copies))
        self.written: dict[int, Later] = defaultdict(lambda: Later(late_copies))
        self.group: list[Callable[[], None]] = []
        self.late_copies = late_copies

    def copy(self, buffer: Shared, pointer: Pointer, mask=None) -> None:
        def work() -> None:
            buffer.data.copy_(pointer.load(mask))

        if self.late_copies:
            self.group.append(work)
        else:
            work()

    def arrive_with_copies(self, place, increment_count: bool) -> None:
        """All threads' arrivals, once the copies are there, or as many more of those that a phase waits for."""
        group, self.group = self.group, []
        barrier = self.engine.barriers[place.data.data_ptr()]
        barrier.missing += increment_count

        def work() -> None:
            for copy in group:
                copy()
            if increment_count:
                barrier.complete(1)
                self.engine.progress()
            else:
                self.engine.arrive(place, barrier.count)

        self.engine.add(place, work)

    def commit(self) -> None:
        group, self.group = self.group, []
        self.copies.add(lambda: [work() for work in group])

    def multiply(self, a, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
        assert is_async
        result = torch.full(acc.shape, math.nan)

        def work() -> None:
            left = a.data if isinstance(a, Shared) else a
            product = left.float() @ b.data.float()
            result.copy_(acc + product if use_acc else product)

        self.products[threading.get_ident()].add(work)
        return result

    def wait_products(self, num_outstanding: int, deps) -> torch.Tensor:
        """A product that may still be outstanding is not copied: the next one adds to it."""
        self.products[threading.get_ident()].wait(num_outstanding)
        return deps[0] if num_outstanding else deps[0].clone()

    def write(self, described: Described, first, buffer: Shared) -> None:
        """A copy of shared memory that reads it when it is done."""
        assert self.has_waited(), "kernels before this one may still read what it writes"
        corner = [int(each) for each in first]
        self.written[threading.get_ident()].add(lambda: described.write(corner, buffer.data))

    def wait_written(self, pendings: int) -> None:
        self.written[threading.get_ident()].wait(pendings)

    def specialize(self, functions: list[tuple], warps: list[int], registers: list[int]) -> None:
        """Every function in a partition of its own, to their ends."""
        self.engine.partitions = Partitions(self.let_inputs_come)
        self.engine.partitions.run([partial(function, *arguments) for function, arguments in functions])
        assert not any(later.work for later in self.written.values() if later.late)
        self.engine.partitions = None

    def wait_for_inputs(self, early: bool) -> None:
        """Inputs come as late as they may: in partitions once none can go on without."""
        partitions = self.engine.partitions
        if partitions is None:
            self.waited.add(None)
            self.let_inputs_come()
        else:
            self.waited.add(threading.current_thread())
            partitions.wait_until(lambda: self.complete)

    def let_inputs_come(self) -> bool:
        """Whether they were wanted and not there."""
        comes = bool(self.waited) and not self.complete
        if comes:
            self.complete = True
            self.on_wait()
        return comes

    def has_waited(self) -> bool:
        return None in self.waited or threading.current_thread() in self.waited

    def store(self, pointer: Pointer, value, mask=None) -> None:
        assert self.has_waited(), "kernels before this one may still read what it writes"
        pointer.store(value, mask)

    def atomic_add(self, pointer: Pointer, value, **order) -> torch.Tensor:
        assert self.has_waited(), "kernels before this one may still read what it adds to"
        return pointer.add(value)

    def assembly(self, text: str, constraints: str, values: list, *types, **options) -> object:
        if text.startswith("fence."):
            return None
        if text.startswith("bar."):
            return self.engine.meet(*text.split(";")[0].replace(",", "").split())
        if text.startswith("cvt.rn.bf16x2"):
            return torch.stack(values, -1).bfloat16().view(torch.int32).squeeze(-1)
        if text.startswith("mov.b32 {"):
            return values[0].unsqueeze(-1).view(options["dtype"][0]).unbind(-1)
        self.assembled.append(values)
        return values[0]

    def names(self) -> dict[str, object]:
        anything = types.SimpleNamespace
        gl = anything(
            uint8=torch.uint8, int16=torch.int16, int32=torch.int32, int64=torch.int64,
            float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32,
            float8e4nv=torch.float8_e4m3fn, float8e5=torch.float8_e5m2,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: self.programs,
            cdiv=lambda x, y: -(-x // y),
            arange=lambda first, last, layout: torch.arange(first, last),
            load=lambda pointer, mask=None, other=0.0, cache_modifier="": pointer.load(mask, other),
            atomic_add=self.atomic_add,
            store=self.store,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            zeros_like=torch.zeros_like,
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            where=lambda *values: torch.where(*map(torch.as_tensor, values)),
            maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
            minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
            max=lambda value, axis: value.amax(axis),
            sum=lambda value, axis: value.sum(axis),
            reshape=torch.reshape, permute=torch.permute, join=lambda a, b: torch.stack((a, b), -1),
            split=lambda value: value.unbind(-1), warp_specialize=self.specialize,
            abs=torch.abs, exp=torch.exp, rsqrt=torch.rsqrt, exp2=torch.exp2, log2=torch.log2, static_range=range,
            convert_layout=lambda value, layout, assert_trivial=False: value,
            thread_barrier=lambda: None, static_assert=_nothing,
            to_tensor=lambda value: value,
            allocate_shared_memory=_poisoned,
            inline_asm_elementwise=self.assembly,
            constexpr=None, tensor=None, tuple=None, shared_memory_descriptor=None,
            **dict.fromkeys(("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout",
                             "DistributedLinearLayout", "SwizzledSharedLayout", "SharedLinearLayout"), _nothing),
            NVMMASharedLayout=anything(get_default_for=_nothing),
        )  # fmt: skip
        engine = self.engine.names()
        engine["tma"].async_copy_shared_to_global, engine["tma"].store_wait = self.write, self.wait_written
        return {
            "gl": gl,
            "tl": gl,
            **engine,
            "async_copy": anything(
                async_copy_global_to_shared=self.copy,
                commit_group=self.commit,
                wait_group=self.copies.wait,
                mbarrier_arrive=self.arrive_with_copies,
            ),
            "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products,
            "fence_async_shared": lambda: None,
            "let_next_start": lambda early: None,
            "wait_for_inputs": self.wait_for_inputs,
        }


def _poisoned(dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
    """Shared memory, NaN where its numbers can be."""
    return Shared(torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype))


def _nothing(*arguments, **options) -> None:
    """A layout, or what is checked when a kernel is compiled."""


def _to(tensor: torch.Tensor, *arguments, bitcast: bool = False, **options) -> torch.Tensor:
    """`torch.Tensor.to`, which as Triton's takes the bits for those of another type where it is told to."""
    return tensor.view(*arguments) if bitcast else _TO(tensor, *arguments, **options)


def _pointers(value: object) -> object:
    """Pointers for tensors, what the copy engine reads for descriptors, those of tuples too, named or not."""
    if isinstance(value, tuple):
        inside = map(_pointers, value)
        return type(value)(*inside) if hasattr(value, "_fields") else tuple(inside)
    if isinstance(value, TensorDescriptor):
        return Described(value.base)
    return Pointer(value) if isinstance(value, torch.Tensor) else value


def run_program(
    kernel,
    program: int | tuple[int, ...],
    late_copies: bool,
    *arguments,
    programs: int = 1,
    on_wait: Callable[[], None] = lambda: None,
    **constants,
) -> list[list]:
    """One program of a Gluon kernel, with all functions that it calls. Tensors become pointers.

    on_wait: called where the kernel waits for its inputs. Returns the arguments of each assembly instruction.
    """
    machine = Machine(program, programs, late_copies, on_wait)
    given = [_pointers(value) for value in arguments]
    names = _names(kernel.fn.__globals__, machine.names(), {})
    with patch.object(torch.Tensor, "to", _to):
        types.FunctionType(kernel.fn.__code__, names)(*given, **constants)
    assert not machine.group
    return machine.assembled


def _names(module: dict, machine: dict, made: dict[int, dict]) -> dict[str, object]:
    """What a function of a module sees: its functions in Python, and the machine's. made: of modules before, by id."""
    if id(module) in made:
        return made[id(module)]
    names = made[id(module)] = dict(module)
    for name, value in module.items():
        if isinstance(value, JITFunction):
            inside = _names(value.fn.__globals__, machine, made)
            names[name] = types.FunctionType(value.fn.__code__, inside, name, value.fn.__defaults__)
        elif isinstance(value, ConstexprFunction) and name.endswith("_layout"):
            names[name] = _nothing
        elif isinstance(value, constexpr):
            names[name] = value.value
    names.update(machine)
    return names
