"""A CUDA C++ kernel on the processor, block after block, with faults that say where they are.

    run_on_host(source, "add", 128, 256, {"x": x, "out": out, "count": x.numel()}, written=("out",))

g++ compiles the source as C++. Here stands what CUDA adds to it: indices, shared memory, the barrier of a block, and
shuffles. Each thread of a block is a fiber. One runs at a time, until it waits or ends, and a warp runs as far ahead of
the others as its barriers let it: in ascending order the first warp, in descending order the last.

What is seen: two threads that reach the same number with nothing between them, if one of them changes it, whether or
not the result is right here (cuda_races.h says how); an access outside a tensor, since memory that cannot be reached
lies on both sides; a write to a tensor that is only read; an address that is not aligned; an index outside an array; a
barrier or shuffle that some threads do not reach; a loop that does not end. Shared memory begins as NaN in each block.
What a shuffle takes from a lane that its mask does not name is NaN. __activemask names the lanes that came the same way
since they last waited for each other, since nothing promises more of a GPU (with g++ before 12: all that come there).
What is not seen: time, and whatever depends on the GPU's compiler. A shuffle is taken to order the lanes that call it,
as __syncwarp does; CUDA promises that of __syncwarp alone. Memory fences order nothing here, and a loop that waits
for another thread's flag never ends.

A check sends the FILES to the process that runs answers. So they use nothing else of the course.

Sources: NVIDIA, CUDA C++ Programming Guide, "Synchronization functions", "Warp shuffle functions", "Independent thread
scheduling". GCC, "Program instrumentation options", for what tells of arrays and alignment.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ORDERS = ("ascending", "descending")
MOST_THREADS = 1024
MOST_SHARED_BYTES = 48 << 10
OLDEST = 8  # version of g++: C++17
MISSING = (
    "g++ 8 or later on Linux, which compiles CUDA C++ for the processor; this machine has none. Install it (Debian and "
    "Ubuntu: apt install g++), or use Colab, which has it."
)
COLUMNS_OF_A_TEXT = 100
FILES = ("cuda_on_host.py", "cuda_races.h", "cuda_block.h", "cuda_launch.h")

STATES = ("can go on", "waits", "waits", "has ended")
(NONE, OUTSIDE, NOT_ALIGNED, INDEX, NOT_REACHED, ENDLESS, DIVISION, MASK, RACE, LOST, ONE_PLACE, BLOCKS) = range(12)
(SHARED, GLOBALS, TENSORS) = range(3)  # what a race is about: shared memory, a variable of the file, a tensor


class KernelFault(Exception):
    """What a kernel did that no GPU would forgive: the sentence says what, where and in which thread."""


class SharedMemoryUnset(KernelFault):
    """A result is NaN, and shared memory was read that nobody had written."""


class LanesNotNamed(KernelFault):
    """A result is NaN, and a shuffle took a number from a lane that its mask does not name."""


class UnknownName(KernelFault):
    """The source uses a name that nothing here declares."""


class DoesNotCompile(KernelFault):
    """g++ refused the source, or the source does not have the kernel that is launched."""


class OutsideATensor(KernelFault):
    """An access beside a tensor."""


class InputWritten(KernelFault):
    """A write to a tensor that is there to be read."""


class NotAligned(KernelFault):
    """A vector whose address is no multiple of its size."""


class OutsideAnArray(KernelFault):
    """An index that a shared or local array does not have."""


class NotReachedByAll(KernelFault):
    """A barrier, or a shuffle, that some of its threads do not reach."""


class BarrierMissing(KernelFault):
    """Two threads of a block reach the same number, one of them changes it, and nothing orders the two."""


class LostUpdate(BarrierMissing):
    """Threads add to the same number by reading it and writing it back: one addition overwrites the other."""


class OnePlaceForSeveral(BarrierMissing):
    """Threads write different numbers to the same place, by the same instruction."""


class BlocksCollide(BarrierMissing):
    """Two blocks reach the same number, and one of them changes it."""


class LaunchBoundTooSmall(KernelFault):
    """The launch has more threads than the kernel's own bound."""


class DoesNotEnd(KernelFault):
    """Threads still ran when their time was over."""


class _Fault(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "thread", "block", "line")),
        ("what", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("other", "other_state", "other_line")),
        ("other_what", ctypes.c_char_p),
        ("mask", ctypes.c_uint),
        ("writes", ctypes.c_int),
        ("number", ctypes.c_longlong),
        ("address", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("other_place", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("other_block", "other_writes", "region", "unset_thread", "unset_block")),
        ("unset_place", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("taken_by", "taken_from", "taken_line", "taken_asked")),
        ("taken_what", ctypes.c_char_p),
        ("taken_mask", ctypes.c_uint),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("given", ctypes.c_void_p),
        ("bytes", ctypes.c_longlong),
        ("may_be_written", ctypes.c_int),
        ("element", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("place", "begin", "end")),
    ]


def files() -> dict[str, str]:
    """The FILES' texts by their names: whoever has them in a folder can load this module from there."""
    return {name: Path(__file__).with_name(name).read_text() for name in FILES}


def missing_host_compiler() -> str | None:
    """What no kernel can be run on the processor without, in words that follow "needs"; None where it is there."""
    return None if _version() >= OLDEST else MISSING


def tells_ways() -> bool:
    """Whether g++ can tell which way each thread went, on which __activemask depends."""
    return _version() >= 12


def _version() -> int:
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:  # elsewhere g++ is another compiler's name
        return 0
    said = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    number = re.match(r"\d+", said)
    return int(number[0]) if number else 0


def run_on_host(source, name, grid, threads, arguments, written, *, order="ascending", seconds=2.0, line=1, given=""):
    """Run all blocks of a kernel, one after another, on tensors of the processor.

    Args:
        source: CUDA C++ without #include, whose kernel is declared `extern "C" __global__`. It has `half_bits`,
            `bfloat16_bits`, `widened` and `narrow`, and need not define them.
        name: of the kernel.
        grid, threads: blocks, and threads of a block, along x.
        arguments: by name, in the kernel's order: a tensor as a pointer, None as a null pointer, an int as `int`, a
            float as `float`. The names are told in faults.
        written: names of the tensors that the kernel may write. What it writes elsewhere is a fault.
        order: of ORDERS: in which blocks, warps and threads run.
        seconds: of the processor, for all blocks.
        line: the number of the source's first line in the file that the learner knows.
        given: what stands before the source and is none of its lines, such as types and constants.

    Returns: what NaN in a result may come from, as a fault that was not raised: the first read of shared memory that
        nobody had written, or the first number that a shuffle took from a lane which its mask does not name. None where
        there was neither. The number may not have been used.

    Raises:
        ValueError: threads is not a number from 1 to 1024, or order none of ORDERS.
        KernelFault: what the kernel did; each of its classes is one kind of fault.
        RuntimeError: there is no g++ here.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads is {threads}; a block has 1 to {MOST_THREADS}.")
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}.")
    if not isinstance(source, str):
        raise DoesNotCompile(f"the source is of the type `{type(source).__name__}`; it must be a text.")
    library = _library(source, name, line, given)
    if library.takes != len(arguments):
        raise DoesNotCompile(
            f"`{name}` has {library.takes} parameters, and is launched with {len(arguments)}: {', '.join(arguments)}."
        )
    _parameters(source, name, library.kinds, arguments)
    if threads > library.most_threads:
        raise LaunchBoundTooSmall(
            f"`{name}` has __launch_bounds__({library.most_threads}), and is launched with {threads} threads. A GPU "
            "refuses that launch. Write __launch_bounds__(THREADS), or leave it out."
        )
    if source in _endless:
        raise DoesNotEnd(_endless[source])
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    values = {key: _value(argument) for key, argument in arguments.items()}
    laid = (_Tensor * len(tensors))(*(_laid(tensor, key in written) for key, tensor in tensors.items()))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values.values()))
    at = (ctypes.c_void_p * len(tensors))(*(ctypes.addressof(values[key]) for key in tensors))
    fault = library.run(
        grid, threads, int(order == "descending"), ctypes.c_double(seconds), pointers, laid, at, len(tensors)
    ).contents
    if fault.kind != NONE:
        raised = _told(fault, library, tensors, laid, threads, seconds)
        if isinstance(raised, DoesNotEnd):
            _endless[source] = str(raised)  # it is not run again
        raise raised
    return _unset(fault, library) if fault.unset_place else _not_in_mask(fault, library) if fault.taken_mask else None


def _unset(fault, library):
    where = library.at(_line_of(library.path, fault.unset_place))
    at = f" (in {where})" if where else ""
    return SharedMemoryUnset(
        f"thread {fault.unset_thread} of block {fault.unset_block} read shared memory{at} that nobody had written; "
        "such memory is NaN here"
    )


def _not_in_mask(fault, library):
    asked = (
        " The mask came from __activemask, and its lanes had gone different ways, through a loop or a branch, since "
        "they last waited for each other."
    )
    return LanesNotNamed(
        f"thread {fault.taken_by} took thread {fault.taken_from}'s number by {fault.taken_what.decode()} (in "
        f"{library.at(fault.taken_line)}), whose mask {fault.taken_mask:#010x} does not name that thread's lane. On a "
        f"GPU it is any number, here NaN.{asked if fault.taken_asked else ''}"
    )


def _parameters(source, name, kinds, arguments):
    """The types that the kernel declares are those with which it is launched: a GPU copies their bytes, unasked."""
    listed = _without_comments(source).split(f"{name}(" if f"{name}(" in source else name, 1)[-1].split(")")[0]
    declared = [" ".join(parameter.strip(" (\n").split()) for parameter in listed.split(",")]
    for place, (kind, (key, argument)) in enumerate(zip(kinds, arguments.items())):
        pointer = argument is None or isinstance(argument, torch.Tensor)
        asked, word = (
            ("p", "a pointer") if pointer else ("f", "`float`") if isinstance(argument, float) else ("i", "`int`")
        )
        if kind != asked:
            said = f"is declared `{declared[place]}`" if len(declared) == len(kinds) else "has another type"
            raise DoesNotCompile(
                f"the parameter {place + 1} of `{name}`, `{key}`, {said}, and is launched as {word}. A launch hands "
                "its bytes over as they are, so the types must be the same."
            )


def _without_comments(source):
    """With as many lines as before."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.S)


def _value(argument):
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def _laid(tensor, may_be_written):
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    bytes_of_all = reach * tensor.element_size() if tensor.numel() else 0
    return _Tensor(tensor.data_ptr(), bytes_of_all, may_be_written, tensor.element_size())


# ------------------------------------------------------------------------------------------------------- the compiler


class _Library:
    """A kernel as it is loaded."""

    def __init__(self, path, lines, line):
        self.path, self.lines, self.line = path, lines, line
        loaded = ctypes.CDLL(path)
        self.takes, self.run = loaded.parameters_of_kernel(), loaded.run_kernel
        self.shared_bytes, self.most_threads = loaded.shared_bytes_of_block(), loaded.most_threads_of_block()
        loaded.kinds_of_parameters.restype = ctypes.c_char_p
        self.kinds = loaded.kinds_of_parameters().decode()
        self.run.restype = ctypes.POINTER(_Fault)

    def at(self, number):
        """A line of the source in words, with what stands there."""
        place = number - self.line
        if not 0 <= place < len(self.lines):
            return ""
        text = self.lines[place].split("//")[0].strip()[:COLUMNS_OF_A_TEXT]
        return f"line {number}, `{text}`"


_libraries: dict = {}
_endless: dict = {}  # by the source


def _library(source, name, line, given):
    key = hashlib.sha256(repr((source, name, line, given)).encode()).hexdigest()
    if key not in _libraries:
        try:
            _libraries[key] = _compiled(source, name, line, given, key)
        except (DoesNotCompile, UnknownName) as refused:
            _libraries[key] = refused
    if isinstance(_libraries[key], KernelFault):
        raise type(_libraries[key])(*_libraries[key].args)
    return _libraries[key]


def _compiled(source, name, line, given, key):
    lines = source.splitlines()
    _look_over(source, name, lines, line)
    version = _version()
    if version < OLDEST:
        raise RuntimeError(f"This needs {MISSING}")
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-host-"))
    text, machine_code, built = folder / "kernel.cpp", folder / "kernel.o", folder / f"{key[:16]}.so"
    races, block, behind = (Path(__file__).with_name(name).read_text() for name in FILES[1:])
    facts = f"#define KERNEL {name}\n#define LAUNCH_BOUND {_launch_bound(source)}\n"
    facts += f"#define VARIABLES_OF_ALL_BLOCKS {int(_has_variables(source))}\n"
    text.write_text(f'{facts}{races}{block}{given}\n#line {line} "kernel.cu"\n{source}\n{behind}')
    flags = [
        "-std=gnu++17",
        "-O1",
        "-g1",
        "-fPIC",
        "-Wno-all",
        "-Werror=vla",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
    ]
    flags += ["-fsanitize=bounds,alignment,thread", "-fsanitize-recover=all", "-fdiagnostics-color=never"]
    flags += ["-ftrivial-auto-var-init=pattern"] if version >= 12 else []  # what nobody set is not 0
    flags += ["-fsanitize-coverage=trace-pc"] if "__activemask" in source and tells_ways() else []
    done = subprocess.run(
        ["g++", *flags, "-c", str(text), "-o", str(machine_code)], capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        refusal = _refusal(done.stderr, lines, line)
        unknown = re.search(r"(was not declared|does not name a type|has not been declared)", refusal)
        raise (UnknownName if unknown else DoesNotCompile)(refusal)
    done = subprocess.run(["g++", "-shared", str(machine_code), "-o", str(built)], capture_output=True, text=True)
    if done.returncode:
        raise DoesNotCompile(f"the linker refused it: {done.stderr.strip()[-300:]}")
    library = _Library(str(built), lines, line)
    if library.shared_bytes > MOST_SHARED_BYTES:
        raise DoesNotCompile(
            f"the block declares {library.shared_bytes:,} bytes of __shared__ memory; a GPU gives a block at most "
            f"{MOST_SHARED_BYTES:,} of those whose size is declared."
        )
    return library


def _launch_bound(source):
    """The expression that __launch_bounds__ has for the threads of a block."""
    found = re.search(r"__launch_bounds__\s*\(((?:[^(),]|\([^()]*\))*)", _without_comments(source))
    return f"({found[1]})" if found else str(MOST_THREADS)


def _has_variables(source):
    """Whether it has variables of its own that all blocks share: only shared memory of templates lies among them."""
    plain = _without_comments(source)
    return "template" not in plain or bool(
        re.search(r"__device__[^(){};]*\w\s*(\[[^\]]*\]\s*)*(=[^;]*|\{[^}]*\})?;", plain)
    )


def _look_over(source, name, lines, line):
    """What g++ would only be confused by."""
    plain = _without_comments(source)
    told = {
        r"^\s*#\s*include": "has an #include. Leave it out: NVRTC has none of CUDA's headers, and none is needed.",
        r"\bextern\s+__shared__": "asks for shared memory whose size comes with the launch, and the launch gives none. "
        "Declare it with its size: `__shared__ float of_warp[THREADS / 32];`.",
        r"\basm\b": "has PTX in `asm`, which runs on a GPU only. Write it in C++.",
        r"__shfl(_xor|_down|_up)?\s*\(": "calls a shuffle without `_sync`, which CUDA no longer has. Its first "
        "argument is the mask of the lanes that take part.",
        r"\bstd::": "uses `std::`, which needs a header. CUDA has sqrtf, fabsf, fmaxf and their like without one.",
        r"__shared__[^;(){}]*[=\w\]]\s*[={]": "gives shared memory a value where it is declared, which CUDA refuses. "
        "Let the threads write it, and put a barrier behind.",
        r"\b__half2?\b": "uses `__half`, which needs the header cuda_fp16.h. Use Element, with widened and narrow.",
    }
    for pattern, words in told.items():
        found = re.search(pattern, plain, re.M)
        if found:
            number = line + plain.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip()))
            raise DoesNotCompile(f"line {number}, `{lines[number - line].strip()[:COLUMNS_OF_A_TEXT]}`, {words}")
    host = _first_host_function(plain)
    if host:
        function, number = host
        raise DoesNotCompile(
            f"line {line + number}, `{lines[number].strip()[:COLUMNS_OF_A_TEXT]}`, declares `{function}` without "
            "`__device__`. Only functions with `__device__` can be called in a kernel."
        )
    if not re.search(rf"\b{re.escape(name)}\s*\(", plain):
        raise DoesNotCompile(f'the text has no kernel `{name}`. It is declared `extern "C" __global__ void {name}(`.')
    if not re.search(rf'extern\s+"C"[\s\w]*\b__global__[^;{{]*\b{re.escape(name)}\s*\(', plain):
        raise DoesNotCompile(f'`{name}` must be declared `extern "C" __global__ void {name}(`, so that it is found.')


def _first_host_function(plain):
    """The name of a function outside of types that is called and is not the GPU's, with its line from 0; or None."""
    markers = r"__device__|__global__|\bconstexpr\b"
    for macro in re.findall(rf"^[ \t]*#[ \t]*define[ \t]+(\w+)[^\n]*(?:{markers})", plain, re.M):
        markers += rf"|\b{macro}\b"
    code = re.sub(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", lambda found: "\n" * found[0].count("\n"), plain, flags=re.M)
    opened, begin = [], 0  # per brace: whether what is inside still stands outside of functions and types
    for place, sign in enumerate(code):
        if sign == ";":
            begin = place + 1
        elif sign == "}":
            begin = place + 1
            if opened:
                opened.pop()
        elif sign == "{":
            head = code[begin:place]
            outside, wraps = (
                all(opened),
                bool(re.match(r'\s*(?:extern\s+"C"|(?:inline\s+)?namespace\b[\s\w:]*)\s*$', head)),
            )
            opened.append(wraps)
            found = re.search(r"(\w+)\s*\([^{}]*\)\s*(?:noexcept\s*)?$", head)
            called = found and len(re.findall(rf"\b{found[1]}\b", code)) > 1
            if outside and not wraps and called and "=" not in head.split("(")[0] and not re.search(markers, head):
                return found[1], code.count("\n", 0, begin + found.start())
            begin = place + 1
    return None


def _refusal(said, lines, line):
    """g++'s first error, with the line of the source."""
    for number, words in re.findall(r"^kernel\.cu:(\d+)(?::\d+)?: (?:fatal )?error: (.*)$", said, re.M):
        place = int(number) - line
        if 0 <= place < len(lines):
            text = lines[place].split("//")[0].strip()[:COLUMNS_OF_A_TEXT]
            return f"line {number}, `{text}`: {_plain(words)}."
        return "the text does not end where it should. Is a bracket or a quote left open?"
    found = re.search(r"error: (.*)", said)
    return f"the compiler says: {_plain(found[1]) if found else said.strip()[-300:]}"


def _plain(words):
    if "variable length array" in words:
        return "an array's length must be known when the kernel is compiled"
    words = words.split("; did you mean")[0]  # of names that the learner never saw
    return re.sub(r"{anonymous}::|\(anonymous namespace\)::|on_host::", "", words).replace("‘", "`").replace("’", "`")


# ---------------------------------------------------------------------------------------------------------- the words


def _told(fault, library, tensors, laid, threads, seconds):
    """A fault as an exception with its sentence."""
    who = f"thread {fault.thread} of block {fault.block}"
    where = library.at(_line_of(library.path, fault.place) if fault.place else fault.line)
    at = f" (in {where})" if where else ""
    if fault.kind == OUTSIDE:
        return _outside(fault, tensors, laid, who, at)
    if fault.kind == NOT_ALIGNED:
        return NotAligned(
            f"{who} reached {fault.number} bytes at once{at} at an address that is no multiple of {fault.number}. A "
            "GPU ends the kernel there. Count pointers and strides in whole vectors, from the row's own beginning."
        )
    if fault.kind == INDEX:
        return OutsideAnArray(f"{who} used the index {fault.number}{at}, which the array does not have.")
    if fault.kind == DIVISION:
        return KernelFault(f"{who} divided a whole number by 0{at}.")
    if fault.kind == ENDLESS:
        return DoesNotEnd(
            f"{who} still ran after {seconds:g} s{at}, and was stopped. Does the loop's condition become false? A loop "
            "over a row advances by the number of threads."
        )
    if fault.kind == MASK:
        return NotReachedByAll(
            f"{who} calls {fault.what.decode()}{at} with the mask {fault.mask:#010x}, in which its own lane, "
            f"{fault.thread % 32}, is missing."
        )
    if fault.kind in (RACE, LOST, ONE_PLACE, BLOCKS):
        return _raced(fault, library, tensors, who, at)
    return _not_reached(fault, library, threads, at)


def _raced(fault, library, tensors, who, at):
    there = library.at(_line_of(library.path, fault.other_place))
    place = at if there and f"(in {there})" in at else f" (in {there})" if there else ""
    what = {SHARED: "shared memory", GLOBALS: "a variable that all blocks share"}.get(fault.region)
    what = what or f"`{list(tensors)[_of_region(fault.region, tensors)]}`"
    if fault.kind == LOST:
        return LostUpdate(
            f"{who} reads a number in {what}{at} to which thread {fault.other} has just added in the same way, with "
            "nothing between the two. On a GPU both read the old number, and one of the two additions is lost."
        )
    does, did = ("reads", "writes")[fault.writes], ("read", "wrote")[fault.other_writes]
    if fault.kind == BLOCKS:
        return BlocksCollide(
            f"{who} {does} a number of {what}{at} that thread {fault.other} of block {fault.other_block} {did}{place}. "
            "Blocks run at the same time or in any order, and nothing makes one wait for another."
        )
    if fault.kind == ONE_PLACE:
        return OnePlaceForSeveral(
            f"{who} writes a number in {what}{at} over another one that thread {fault.other} has just written there by "
            "the same line. On a GPU any of the two may stay."
        )
    return BarrierMissing(
        f"{who} {does} a number in {what}{at} that thread {fault.other} {did}{place}, and no barrier lies between the "
        "two. On a GPU either may come first."
    )


def _of_region(region, tensors):
    """Which tensor a region is: those without an element have none."""
    return [place for place, tensor in enumerate(tensors.values()) if tensor.numel()][region - TENSORS]


def _not_reached(fault, library, threads, at):
    what, other = fault.what.decode(), fault.other
    waits = f"thread {fault.thread} of block {fault.block} waits in {what}{at}"
    named = f", whose mask {fault.mask:#010x} names thread {other}," if what != "__syncthreads" else ""
    if other >= threads:
        return NotReachedByAll(f"{waits}{named} and the block has {threads} threads only.")
    if STATES[fault.other_state] == "has ended":
        does = "has ended"
    else:
        there = library.at(fault.other_line)
        same = there and fault.other_line == fault.line and fault.other_what == fault.what
        does = "waits there with another mask" if same else f"waits in {fault.other_what.decode()} (in {there})"
    subject = "that" if named else f"thread {other}"
    advice = (
        "Every thread of the block must reach the same barrier: take it out of the branch or the loop, and let no "
        "thread return before it."
        if what == "__syncthreads"
        else "All lanes that the mask names must call the same shuffle: take it out of the branch or the loop."
    )
    return NotReachedByAll(f"{waits}{named} but {subject} {does}. {advice}")


def _outside(fault, tensors, laid, who, at):
    """An address that is in no tensor, or in one that is not there to be written: the nearest is told."""
    address = fault.address or 0
    who = "a thread" if fault.thread < 0 else who
    does = {0: "read", 1: "wrote", -1: "reached"}[fault.writes]

    def distance(which):
        begin, end = which.place, which.place + which.bytes
        return max(begin - address, address - end + 1, 0)

    (name, tensor), which = min(zip(tensors.items(), laid), key=lambda pair: distance(pair[1]))
    size, count = tensor.element_size(), which.bytes // tensor.element_size()
    element = (address - which.place) // size
    if distance(which) == 0:
        return InputWritten(f"{who} wrote to `{name}`{at}, which is there to be read only.")
    if distance(which) > 16 << 20:
        return OutsideATensor(
            f"{who} {does} memory that belongs to no tensor{at}. Is a pointer wrong, or a local array too large?"
        )
    side = f"{-element:,} elements before its beginning" if element < 0 else f"element {element:,}"
    return OutsideATensor(f"{who} {does} {side} of `{name}`{at}, which reaches over {count:,} elements.")


def _line_of(path, place):
    """The line of the source to which a place in the code belongs; 0 where that cannot be found out."""
    if shutil.which("addr2line") is None:
        return 0
    said = subprocess.run(["addr2line", "-i", "-e", path, hex(place)], capture_output=True, text=True).stdout
    found = re.search(r"kernel\.cu:(\d+)", said)
    return int(found[1]) if found else 0
