"""A Gluon kernel of warp roles played on the CPU: its own source, on PyTorch tensors, in an order drawn at random.

Gluon has no interpreter. Here the functions of a kernel run as the Python that they are, under other meanings of the
names they use (`MEANINGS`): tiles in registers are tensors, shared and tensor memory are tensors that are written in
place. Each role of `warp_specialize` is a thread. One thread runs at a time, from one place at which another could
notice it (a barrier, an access to memory) to the next; whose turn comes then is drawn. Copies and matrix products are
asynchronous: they read and write at a moment drawn after they were asked for, the products one after the other.

So a barrier that is missing shows as a wrong result in some of the orders, and one too many as a deadlock, which is
told. What it cannot show: layouts, the memory model's fences, and registers.
"""

import ast
import inspect
import random
import sys
import threading
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace

import torch

from course_lib.hardware.compiler.kernel_source import decorator_of, function_of
from course_lib.kernels.common.exponentials import exp2_polynomial_reference


class Tile(torch.Tensor):
    """A tile in registers, or a number: a tensor whose layout nobody asks for."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def tile(tensor) -> Tile:
    return torch.as_tensor(tensor).as_subclass(Tile)


class Deadlock(AssertionError):
    """Nobody can go on; the message says who waits for what."""


# ------------------------------------------------------------------------------------------------- whose turn it is


@dataclass
class Role:
    name: str
    thread: threading.Thread | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_go_on: object = None  # a function: whether what the role waits for has come
    waits_for: str = ""
    finished: bool = False
    error: BaseException | None = None
    stores: int = 0  # copies to memory that are under way


class Stage:
    """The roles of one program, its copies and its products."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.speeds: dict[str, float] = {}
        self.control = threading.Semaphore(0)
        self.roles: list[Role] = []
        self.copies: list = []  # in any order
        self.products: list = []  # in order

    def play(self, parts) -> None:
        for function, arguments in parts:
            role = Role(function.__name__ + str(len(self.roles)), may_go_on=lambda: True)
            role.thread = threading.Thread(target=self._perform, args=(role, function, arguments), daemon=True)
            self.roles.append(role)
            role.thread.start()
        while True:
            choices = [role for role in self.roles if not role.finished and role.may_go_on()]
            choices += ["copy"] * bool(self.copies) + ["product"] * bool(self.products)
            if not choices:
                break
            choice = self.random.choices(choices, [self.speed_of(choice) for choice in choices])[0]
            if choice == "copy":
                self.copies.pop(self.random.randrange(len(self.copies)))()
            elif choice == "product":
                self.products.pop(0)()
            else:
                choice.turn.release()
                self.control.acquire()
                if choice.error is not None:
                    raise choice.error
        waiting = [f"{role.name} waits for {role.waits_for}" for role in self.roles if not role.finished]
        if waiting:
            raise Deadlock("; ".join(waiting))

    def speed_of(self, choice) -> float:
        """How likely a role, the copies or the products are to go on, drawn for each play: up to a thousand to one."""
        name = choice if isinstance(choice, str) else choice.name
        if name not in self.speeds:
            self.speeds[name] = 10 ** self.random.uniform(-1.5, 1.5)
        return self.speeds[name]

    def _perform(self, role: Role, function, arguments) -> None:
        threading.current_thread().role = role  # type: ignore[attr-defined]
        role.turn.acquire()
        try:
            function(*arguments)
        except BaseException as error:  # told where the play is watched
            role.error = error
        role.finished = True
        self.control.release()

    def pause(self, may_go_on=lambda: True, waits_for="") -> None:
        """Gives the turn away until `may_go_on()`; before the roles part there is nobody to give it to."""
        role = getattr(threading.current_thread(), "role", None)
        if role is not None:
            role.may_go_on, role.waits_for = may_go_on, waits_for
            self.control.release()
            role.turn.acquire()


# ------------------------------------------------------------------------------------------------------- memory


class Barrier:
    name = "a barrier"

    def __init__(self):
        self.count = self.missing = self.bytes = self.phase = 0

    def settle(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Memory:
    """A tile of shared or tensor memory."""

    def __init__(self, stage: Stage, data: torch.Tensor):
        self.stage, self.data = stage, data
        self.shape, self.dtype, self.layout = list(data.shape), data.dtype, None

    def _view(self, data) -> "Memory":
        return Memory(self.stage, data)

    def index(self, number):
        return self._view(self.data[int(number)])

    def reshape(self, shape):
        return self._view(self.data.view(shape))

    def permute(self, order):
        return self._view(self.data.permute(order))

    def slice(self, start, length, dim=1):
        return self._view(self.data.narrow(dim, start, length))

    def load(self, layout=None):
        self.stage.pause()
        return tile(self.data.clone())

    def store(self, value):
        assert value.dtype == self.dtype and list(value.shape) == self.shape
        self.stage.pause()
        self.data.copy_(value)


class Barriers(list):
    index = list.__getitem__


class Descriptor:
    """A tensor [batch, heads, length, head_dim] that moves in tiles [1, 1, rows, columns]."""

    layout = None

    def __init__(self, tensor: torch.Tensor, rows: int, columns: int):
        self.tensor, self.dtype = tensor, tensor.dtype
        nbytes = rows * columns * tensor.element_size()
        self.block_type = SimpleNamespace(shape=[1, 1, rows, columns], nbytes=nbytes)

    def part(self, place):
        """The part of the tensor that a tile at `place` covers; shorter than the tile where the tensor ends."""
        batch, head, row, column = (int(number) for number in place)
        assert row >= 0 and column == 0
        rows, columns = self.block_type.shape[2:]
        return self.tensor[batch, head, row : row + rows, :columns]


@dataclass
class Pointer:
    tensor: torch.Tensor
    offset: object = 0

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)


# ------------------------------------------------------------------------------------- other meanings of the names


def meanings(stage: Stage, program: int, deaf_to: str) -> dict:
    """What the names mean that kernels import from Gluon, and the few that lead out of a kernel's Python."""

    def wait(barrier, phase):
        if not barrier.name.startswith(f"{deaf_to}["):
            stage.pause(lambda: barrier.phase & 1 != int(phase), f"{barrier.name}, phase {int(phase)}")

    def arrive(barrier, count=1):
        barrier.missing -= count
        assert barrier.missing >= 0, f"{barrier.name} is told more often than it was made for"
        barrier.settle()
        stage.pause()

    def expect(barrier, nbytes):
        barrier.bytes += nbytes
        arrive(barrier)

    def initialise(barrier, count):
        barrier.count = barrier.missing = count

    def load_tile(descriptor, place, barrier, target):
        def copy():
            part = descriptor.part(place)
            target.data.zero_()
            target.data[0, 0, : part.shape[0], : part.shape[1]] = part
            barrier.bytes -= descriptor.block_type.nbytes
            barrier.settle()

        stage.copies.append(copy)
        stage.pause()

    def store_tile(descriptor, place, source):
        role = threading.current_thread().role  # type: ignore[attr-defined]
        role.stores += 1

        def copy():
            part = descriptor.part(place)
            part.copy_(source.data[0, 0, : part.shape[0], : part.shape[1]])
            role.stores -= 1

        stage.copies.append(copy)
        stage.pause()

    def wait_for_stores(pending):
        role = threading.current_thread().role  # type: ignore[attr-defined]
        stage.pause(lambda: role.stores <= pending, "its stores")

    def tcgen05_mma(left, right, accumulator, *, use_acc, mbarriers, mbarrier_preds):
        told = [barrier for barrier, wanted in zip(mbarriers, mbarrier_preds, strict=True) if wanted]

        def product():
            result = left.data.float() @ right.data.float()
            accumulator.data.copy_(accumulator.data + result if use_acc else result)
            for barrier in told:
                barrier.missing -= 1
                barrier.settle()

        stage.products.append(product)
        stage.pause()

    def allocate(dtype, shape, layout=None):
        if layout == "barriers":
            return Barriers(Barrier() for _ in range(shape[0]))
        return Memory(stage, torch.full(shape, float("nan")).to(dtype))

    def reinterpret_columns(columns, dtype, shape, layout):
        return Memory(stage, columns.data.view(dtype)[:, : shape[1]])

    def store(pointer, values, mask):
        pointer.tensor.view(-1)[pointer.offset[mask].long()] = values[mask]

    def of_both(function):
        return lambda left, right: tile(function(torch.as_tensor(left), torch.as_tensor(right)))

    layouts = dict.fromkeys(("SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), lambda *arguments: None)
    gl = SimpleNamespace(
        constexpr=None, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16, int32=torch.int32,
        int64=torch.int64, static_range=range, cdiv=lambda total, size: -(-total // size),
        program_id=lambda axis: tile(torch.tensor(program)),
        arange=lambda start, end, layout=None: tile(torch.arange(start, end)),
        full=lambda shape, value, dtype, layout=None: tile(torch.full(shape, value, dtype=dtype)),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(shape, dtype=dtype)),
        where=lambda condition, left, right: tile(torch.where(condition, left, right)),
        maximum=of_both(torch.maximum), minimum=of_both(torch.minimum),
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis), sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2, log2=torch.log2, expand_dims=torch.unsqueeze, store=store,
        convert_layout=lambda x, layout, assert_trivial=False: x, allocate_shared_memory=allocate,
        warp_specialize=lambda parts, warps, registers: stage.play(parts), **layouts,
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        wait=wait, arrive=arrive, expect=expect, init=initialise, MBarrierLayout=lambda: "barriers"
    )
    return {
        "gl": gl, "mbarrier": mbarrier, "load_tile": load_tile, "store_tile": store_tile,
        "wait_for_stores": wait_for_stores, "fence_async_shared": lambda: None, "tcgen05_mma": tcgen05_mma,
        "allocate_tensor_memory": allocate, "TensorMemoryLayout": lambda *_, **__: None,
        "reinterpret_columns": reinterpret_columns, "unknown": lambda number: number,
        "row_by_thread": lambda columns: None, "exp2_polynomial": exp2_polynomial_reference,
        "scaled_less": lambda scores, scale, subtracted: scores * scale - subtracted[:, None],
    }  # fmt: skip


def played(kernel, others: dict, done: dict | None = None):
    """The Python function under a jit function, with `others` for the names it uses, and so for all that it calls."""
    done = {} if done is None else done
    function = function_of(kernel)
    if function not in done:
        names: dict = {"__builtins__": __builtins__}
        done[function] = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        for name in function.__code__.co_names:
            if name in others:
                names[name] = others[name]
            elif name in function.__globals__:
                value = function.__globals__[name]
                names[name] = played(value, others, done) if decorator_of(value) else meaning_of(value)
    return done[function]


def meaning_of(value):
    """A constant's value; of a bundle of a kernel's, one that any object fits in."""
    if type(value).__name__ == "constexpr":
        return value.value
    if not isinstance(value, type):
        return value
    fields = fields_of(value)

    def bundle(*arguments, **named):
        bundled = SimpleNamespace(**dict(zip(fields, arguments)), **named)
        for name, barriers in vars(bundled).items():
            if isinstance(barriers, Barriers):
                for number, barrier in enumerate(barriers):
                    barrier.name = f"{name}[{number}]"
        return bundled

    return bundle


def fields_of(bundle: type) -> list[str]:
    """The names of a kernel's bundle, as its file has them: Triton 3.6 keeps no annotations."""
    (written,) = (
        node
        for node in ast.parse(inspect.getsource(sys.modules[bundle.__module__])).body
        if isinstance(node, ast.ClassDef) and node.name == bundle.__name__
    )
    return [node.target.id for node in written.body if isinstance(node, ast.AnnAssign)]


def play_program(kernel, program: int, seed: int, deaf_to: str = "", **arguments) -> None:
    """Plays one program of a launch; arguments are the kernel's, with `Descriptor`s and `Pointer`s for its tensors.

    seed: draws the order. deaf_to: the name of a kind of barriers that nobody waits for, to see what they are good for.
    """
    played(kernel, meanings(Stage(seed), program, deaf_to))(**arguments)
