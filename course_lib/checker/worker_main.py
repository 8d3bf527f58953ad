"""The worker's own program: it runs answers, and holds none.

Started as a script, alone: `python worker_main.py FD TRAFFIC_MODULE COURSE_ROOT`. It imports PyTorch and Triton once, then forks
one child for every check. The child compiles the learner's cell in a file of its own, runs the cases, and streams what
came out and what was seen; when it crashes, hangs or prints without end, only the child dies. The course itself is not
importable here: no oracle, solution or library kernel.

Messages to the worker: a JSON header (limits), then the job (see `wire`). Messages back: b"F" + a frame of the child, and
at the end b"E" + JSON on how the child ended.
"""
from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import resource
import selectors
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path

GUARD_BYTES = 16 << 10
# NaN payloads that arithmetic does not make by itself: never-written memory, and the bands around every input.
POISON = {2: 0x7E5D, 4: 0x7FC5_DEAD, 8: 0x7FF8_DEAD_DEAD_DEAD}
POISON_BF16 = 0x7FDD
GUARD = {2: 0x7E6B, 4: 0x7FC6_BEEF, 8: 0x7FF8_BEEF_BEEF_BEEF}
GUARD_BF16 = 0x7FEB
FRAME_LIMIT = 3 << 30


def _load(name: str, path: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------ the child: one check


class _Answer:
    """A learner's cell, compiled from a file of its own so that Triton and tracebacks find its source."""

    def __init__(self, source: str, label: str, folder: Path):
        self.path = folder / f"exercise_{label.replace('.', '_')}.py"
        self.path.write_text(source, encoding="utf-8")
        self.module = types.ModuleType("answer")
        self.module.__file__ = str(self.path)
        sys.modules["answer"] = self.module
        self.module.__dict__.update(_usual_names())
        self.source = source

    def run(self) -> dict:
        exec(compile(self.source, str(self.path), "exec"), self.module.__dict__)
        return self.module.__dict__


class _Silent:
    """Stands in for notebook helpers (`check`, `get_ipython`, ...) that an exercise cell may mention: does nothing."""

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        return self


def _usual_names() -> dict:
    """What a cell may use without importing it: the imports at the head of every chapter."""
    import numpy
    import torch
    import torch.nn.functional

    names = {"torch": torch, "np": numpy, "math": math, "F": torch.nn.functional}
    with contextlib.suppress(ImportError):
        import triton
        import triton.language

        names |= {"triton": triton, "tl": triton.language}
    return names | dict.fromkeys(("check", "hint", "solution", "progress", "get_ipython"), _Silent())


def _bits(tensor, table, bf16_pattern):
    """The bit pattern for this tensor's dtype, and the integer dtype to compare it in."""
    import torch

    size = tensor.element_size()
    if not tensor.is_floating_point() or size not in table:
        return None, None
    pattern = bf16_pattern if tensor.dtype == torch.bfloat16 else table[size]
    return pattern, {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


def _fill(tensor, table, bf16_pattern) -> None:
    """Fill a contiguous tensor with the pattern; integers get 0x5A bytes, booleans True."""
    import torch

    pattern, integer = _bits(tensor, table, bf16_pattern)
    if pattern is not None:
        tensor.view(integer).fill_(pattern)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.view(torch.uint8).fill_(0x5A)


def _count_pattern(tensor, table, bf16_pattern) -> int:
    pattern, integer = _bits(tensor, table, bf16_pattern)
    if pattern is None or not tensor.numel():
        return 0
    return int((tensor.contiguous().view(integer) == pattern).sum())


class _Guarded:
    """An input in the middle of a larger buffer whose margins are poisoned."""

    def __init__(self, name: str, source, device):
        import torch

        self.name = name
        extent = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride())) if source.numel() else 0
        margin = GUARD_BYTES // source.element_size()
        self.margin, self.extent = margin, extent
        self.buffer = torch.empty(margin + extent + margin, dtype=source.dtype, device=device)
        _fill(self.buffer, GUARD, GUARD_BF16)
        self.tensor = torch.as_strided(self.buffer, source.shape, source.stride(), margin)
        if extent:
            inner = torch.as_strided(source, (extent,), (1,), source.storage_offset())
            self.buffer[margin : margin + extent].copy_(inner)
        self.original = self.buffer.clone()

    def _changed(self, part) -> bool:
        import torch

        if not self.buffer[part].numel():
            return False
        return not torch.equal(self.buffer[part].view(torch.uint8), self.original[part].view(torch.uint8))

    def margin_written(self) -> str | None:
        before, after = slice(0, self.margin), slice(self.margin + self.extent, None)
        for part, where in ((before, "before the start"), (after, "past the end")):
            if self._changed(part):
                return f"the memory {where} of `{self.name}` was written"
        return None

    def modified(self) -> bool:
        return self._changed(slice(self.margin, self.margin + self.extent))

    def restore(self) -> None:
        self.buffer.copy_(self.original)


class _Arguments:
    """A case's arguments, moved to the device, guarded, and remembered."""

    def __init__(self, packed, names, device):
        self.device, self.guards, self.writable = device, [], {}
        self.values = [self._place(value, names[i] if i < len(names) else f"argument {i + 1}")
                       for i, value in enumerate(packed)]

    def _place(self, value, name):
        import torch

        if isinstance(value, torch.Tensor):
            guard = _Guarded(name, value, self.device)
            self.guards.append(guard)
            return guard.tensor
        if isinstance(value, dict) and set(value) == {"in_out"}:
            guard = _Guarded(name, value["in_out"], self.device)
            self.guards.append(guard)
            self.writable[name] = guard
            return guard.tensor
        if isinstance(value, (tuple, list)):
            return type(value)(self._place(item, f"{name}[{i}]") for i, item in enumerate(value))
        if isinstance(value, dict):
            return {key: self._place(item, f"{name}[{key!r}]") for key, item in value.items()}
        return value


def _observer():
    """A mode that records PyTorch operations and poisons memory that is handed out uninitialised."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operations, self.largest = collections.Counter(), 0

        def __torch_dispatch__(self, function, types_, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            self.operations[name] += 1
            if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                if "empty" in name and result.numel():
                    flat = torch.as_strided(result, (result.untyped_storage().nbytes() // result.element_size(),), (1,), 0)
                    _fill(flat, POISON, POISON_BF16)
                if function.is_view is False and not name.endswith("_"):
                    self.largest = max(self.largest, result.numel())
            return result

    return Observer()


def _location(error: BaseException, path: Path) -> int | None:
    """The line in the learner's cell that an exception comes from."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == str(path):
            line = number
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = error.lineno
    return line


def _describe_error(error: BaseException, path: Path) -> dict:
    """An exception as plain data; the cause counts where Triton wraps it."""
    inner = error
    while inner.__cause__ is not None and type(error).__module__.startswith("triton"):
        inner = inner.__cause__
        if not type(inner).__module__.startswith("triton"):
            break
    line = _location(error, path) or _location(inner, path)
    return {"type": type(inner).__name__, "text": str(inner)[:4000], "outer": f"{type(error).__name__}: {error}"[:4000],
            "line": line, "out_of_memory": isinstance(inner, MemoryError) or "can't allocate memory" in str(inner)
            or type(inner).__name__ == "OutOfMemoryError"}


def _parameter_names(function) -> list[str]:
    code = getattr(function, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


class _Child:
    """Runs one job in a process of its own and streams frames to the worker."""

    def __init__(self, wire, traffic, pipe: int, folder: Path):
        self.wire, self.traffic, self.pipe, self.folder = wire, traffic, pipe, folder

    def send(self, frame: dict) -> None:
        message = self.wire.encode(frame)
        data = struct.pack("<Q", len(message)) + message
        view = memoryview(data)
        while view:
            view = view[os.write(self.pipe, view[: 1 << 20]) :]

    def run(self, job: dict) -> None:
        import torch

        torch.set_num_threads(1)
        self.job = job
        self.device = torch.device(job["device"])
        self.answer = _Answer(job["source"], job["exercise"], self.folder)
        try:
            namespace = self.answer.run()
        except BaseException as error:
            self.send({"kind": "cell_error", "error": _describe_error(error, self.answer.path)})
            return
        missing = [name for name in job["entries"].values() if name not in namespace]
        if missing:
            self.send({"kind": "missing", "names": missing})
            return
        self.functions = {entry: namespace[name] for entry, name in job["entries"].items()}
        not_callable = [name for name, value in self.functions.items() if not callable(value)]
        if not_callable:
            self.send({"kind": "not_callable", "names": not_callable})
            return
        for index, case in enumerate(job["cases"]):
            self.send({"kind": "start", "index": index})
            frame = self.run_case(index, case)
            self.send(frame)
            if frame["error"] and (frame["error"]["out_of_memory"] or self.device.type == "cuda"):
                break  # the next case would meet the same wall, or a device that this error has left unusable
        self.send({"kind": "done"})

    def run_case(self, index: int, case: dict) -> dict:
        import torch

        function = self.functions[case["entry"]]
        if case["driver"]:
            scope = _usual_names()
            exec(compile(case["driver"]["source"], "<driver>", "exec"), scope)
            drive, functions = scope[case["driver"]["name"]], dict(self.functions)
            names = _parameter_names(drive)[1:]

            def call(*values):
                return drive(functions, *values)
        else:
            names, call = _parameter_names(function), function
        arguments = _Arguments(case["args"], names, self.device)
        observer = _observer()
        frame: dict = {"kind": "case", "index": index, "error": None, "result": None}
        started = time.perf_counter()
        result = None
        with contextlib.ExitStack() as stack:
            watching = self.watch(stack, arguments, observer)
            started = time.perf_counter()
            try:
                result = call(*arguments.values)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except BaseException as error:
                frame["error"] = _describe_error(error, self.answer.path)
            frame["seconds"] = time.perf_counter() - started
        frame |= watching()
        frame["operations"] = dict(observer.operations)
        frame["largest_allocation"] = observer.largest
        if frame["error"] is None or self.device.type == "cpu":
            margins = [note for guard in arguments.guards if (note := guard.margin_written())]
            frame["out_of_bounds"] = [*frame["out_of_bounds"], *margins]
            frame["modified_inputs"] = [
                guard.name for guard in arguments.guards if guard.name not in arguments.writable and guard.modified()
            ]
        if frame["error"] is None:
            self.collect(frame, result, arguments)
            if case["baseline"] and self.device.type == "cuda":
                frame["timing"], again = self.time(case, call, arguments)
                frame["result_after_timing"] = again
        return frame

    def watch(self, stack, arguments, observer):
        """Enter the meters; the function returned gives what they saw once the stack has closed."""
        if self.traffic is None:
            stack.enter_context(observer)
            return lambda: {"launches": [], "traffic": {}, "out_of_bounds": []}
        if os.environ.get("TRITON_INTERPRET") == "1":
            meter = stack.enter_context(self.traffic.TrafficMeter())
            stack.enter_context(observer)

            def seen():
                report = meter.report()
                traffic = {
                    row.name: {"loaded": row.loaded_bytes, "stored": row.stored_bytes, "atomic": row.atomic_bytes,
                               "distinct_loaded": row.distinct_loaded_bytes, "distinct_stored": row.distinct_stored_bytes}
                    for row in report.tensors
                }
                accesses = [str(access) for access in report.out_of_bounds]
                return {"launches": [launch.kernel for launch in report.launches], "traffic": traffic,
                        "out_of_bounds": accesses}

            return seen
        launches = stack.enter_context(self.traffic.record_launches())
        stack.enter_context(observer)
        return lambda: {"launches": [launch.kernel for launch in launches], "traffic": {}, "out_of_bounds": []}

    def collect(self, frame, result, arguments) -> None:
        """Put the result and what was written in place into the frame, or say why it cannot be sent."""
        written = {name: guard.tensor for name, guard in arguments.writable.items()}
        try:
            self.wire.encode(result)  # an unusable value is the answer's fault, and named as such
            frame["result"], frame["written"] = result, written
        except self.wire.WireError as error:
            frame["error"] = {"type": "TypeError", "text": f"the answer returned {error}", "outer": "", "line": None,
                              "out_of_memory": False, "unusable": True}
            return
        frame["unwritten"] = frame["guard_values"] = 0
        for tensor in _tensors([result, written]):
            frame["unwritten"] += _count_pattern(tensor, POISON, POISON_BF16)
            frame["guard_values"] += _count_pattern(tensor, GUARD, GUARD_BF16)

    def time(self, case, call, arguments):
        """Median seconds of the answer and the baseline, in turn, with the L2 cache flushed before every call."""
        import torch

        scope = _usual_names()
        exec(compile(case["baseline"]["source"], "<baseline>", "exec"), scope)
        baseline = scope[case["baseline"]["name"]]
        flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)

        def once(function):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            function(*arguments.values)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e-3

        times = {"answer": [], "baseline": []}
        for _ in range(3):
            once(call), once(baseline)
        for _ in range(25):
            times["answer"].append(once(call))
            times["baseline"].append(once(baseline))
        again = call(*arguments.values)
        torch.cuda.synchronize()
        return {name: statistics.median(values) for name, values in times.items()}, again


def _tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


# -------------------------------------------------------------------------------------------- the worker: fork and watch


def _limit_child(limits: dict) -> None:
    """Bounds on memory and file size that hold in this process and whatever it starts."""
    if limits["memory_bytes"] and hasattr(resource, "RLIMIT_DATA"):
        in_use = 0
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmData:"):
                    in_use = int(line.split()[1]) << 10
        limit = in_use + limits["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent() -> None:
    """Linux: the kernel kills this process when the worker dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _child_main(wire, traffic, limits, job, frames: int, output: int, private_fds, folder: Path) -> None:
    os.setsid()
    _die_with_parent()
    for fd in private_fds:
        os.close(fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False), open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False))
    builtins.input = _no_input
    os.chdir(folder)
    _limit_child(limits)
    child = _Child(wire, traffic, frames, folder)
    try:
        child.run(wire.decode(job))
    except BaseException as error:  # the harness itself failed: say so rather than vanish
        child.send({"kind": "harness_error", "text": "".join(traceback.format_exception(error))[-4000:]})
    sys.stdout.flush()


def _no_input(prompt=""):
    raise EOFError("input() has no one to answer it during a check")


class _Worker:
    """The process that stays warm: takes jobs, forks, relays frames, enforces the limits."""

    def __init__(self, connection: Connection, wire, traffic):
        self.connection, self.wire, self.traffic = connection, wire, traffic

    def serve(self) -> None:
        while True:
            try:
                limits = json.loads(self.connection.recv_bytes())
                job = self.connection.recv_bytes()
            except (EOFError, OSError):
                return
            self.one(limits, job)

    def one(self, limits: dict, job: bytes) -> None:
        frames_read, frames_write = os.pipe()
        output_read, output_write = os.pipe()
        folder = Path(tempfile.mkdtemp(prefix="course-check-"))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                private = (self.connection.fileno(), frames_read, output_read)
                _child_main(self.wire, self.traffic, limits, job, frames_write, output_write, private, folder)
                status = 0
            finally:
                os._exit(status)
        os.close(frames_write)
        os.close(output_write)
        try:
            ending = self.relay(pid, frames_read, output_read, limits)
        finally:
            os.close(frames_read)
            os.close(output_read)
            shutil.rmtree(folder, ignore_errors=True)
        self.connection.send_bytes(b"E" + json.dumps(ending).encode())

    def relay(self, pid: int, frames: int, output: int, limits: dict) -> dict:
        """Pass frames on until the child ends or a limit is reached; then make sure that nothing of it is left."""
        deadline = time.monotonic() + limits["seconds"]
        self._status = None
        pending, printed, printed_bytes, finished = bytearray(), bytearray(), 0, False
        ending: dict = {"timeout": False, "too_much_output": False}
        with selectors.DefaultSelector() as selector:
            selector.register(frames, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while not finished and selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    ending["timeout"] = True
                    break
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        selector.unregister(key.fd)
                        # Frames close when the child is gone; its own children may hold the output open for ever.
                        finished = finished or key.fd == frames
                    elif key.fd == output:
                        printed_bytes += len(data)
                        printed = (printed + data)[: 64 << 10]
                        if printed_bytes > limits["output_bytes"]:
                            ending["too_much_output"] = finished = True
                    else:
                        pending += data
                        finished = not self.forward(pending) or finished
        if not (ending["timeout"] or ending["too_much_output"]):
            self.let_end(pid, deadline)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = self._status if self._status is not None else os.waitpid(pid, 0)[1]
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError, OSError):
            printed = (printed + os.read(output, 64 << 10))[: 64 << 10]
        ending["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        ending["exit_status"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        ending["printed"] = printed.decode("utf-8", "replace")[:8000]
        return ending

    _status: int | None = None

    def let_end(self, pid: int, deadline: float) -> None:
        """Wait a moment for a child that has closed its pipe to say how it ended."""
        limit = min(deadline, time.monotonic() + 2.0)
        while time.monotonic() < limit:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._status = status
                return
            time.sleep(0.002)

    def forward(self, pending: bytearray) -> bool:
        """Send every whole frame in `pending` to the judge; False when the stream makes no sense."""
        while len(pending) >= 8:
            (length,) = struct.unpack_from("<Q", pending)
            if length > FRAME_LIMIT:
                return False
            if len(pending) < 8 + length:
                return True
            self.connection.send_bytes(b"F" + bytes(pending[8 : 8 + length]))
            del pending[: 8 + length]
        return True


def _belongs_to_course(entry: str, root: Path) -> bool:
    """Whether a module search path lies in the course itself (an environment inside its folder does not count)."""
    path = Path(entry or ".").resolve()
    return path == root or (root in path.parents and "site-packages" not in path.parts and "lib" not in path.parts)


def _warm_up(traffic) -> None:
    """Pay for what happens once (the meter's self-test, the interpreter's first kernel) before the first check."""
    import torch

    with contextlib.suppress(traffic.MeterUnavailable), traffic.TrafficMeter(), _observer():
        torch.empty(1)


def main() -> None:
    fd, traffic_path, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [entry for entry in sys.path if not _belongs_to_course(entry, root)]
    os.environ.pop("PYTHONPATH", None)
    wire = _load("_course_wire", str(Path(__file__).with_name("wire.py")))
    import torch

    torch.set_num_threads(1)
    traffic = None
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        traffic = _load("_course_traffic", traffic_path)
        traffic.repair_interpreter()
        if os.environ.get("TRITON_INTERPRET") == "1":
            _warm_up(traffic)
    connection = Connection(fd)
    ready = {"torch": torch.__version__, "triton": getattr(sys.modules.get("triton"), "__version__", None)}
    connection.send_bytes(b"R" + json.dumps(ready).encode())
    _Worker(connection, wire, traffic).serve()


if __name__ == "__main__":
    main()
