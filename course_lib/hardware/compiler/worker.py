"""Compiles kernels for an architecture that need not be present. Run as a script, in a process of its own.

    python worker.py FD

A process that interprets kernels cannot compile them (Triton decides at import), so `process.py` starts this one with
the interpreter off. It needs no GPU: Triton's wheel carries ptxas and the disassembler. It imports Triton once and then
forks a child for each request that comes over the socket FD, so that a crash of the compiler costs one kernel, and one
kernel leaves nothing behind for the next. It ends when the socket closes, or when nobody has asked for a while.
"""

import contextlib
import importlib
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

IDLE_SECONDS = 600


def main(fd: str) -> None:
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # this folder's files are no top-level modules
    connection = Connection(int(fd))
    _warm_up()
    with contextlib.suppress(EOFError, OSError):
        while connection.poll(IDLE_SECONDS):
            request, seconds = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_in_a_child(request, seconds)))


def _warm_up() -> None:
    """What every child would do again: import the compiler, and compute the digest of Triton's own files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):  # what is wrong, a request is told
        source = "def nothing(pointer):\n    tl.store(pointer, 0)"
        space = {"functions": [("nothing", "triton.jit", source)], "modules": {}, "imports": {}, "constants": {}}
        request = {
            "namespaces": [{**space, "links": {}}],
            "kernel": (0, "nothing"),
            "constexprs": {},
            "function_constexprs": {},
            "signature": {"pointer": "*i32"},
            "divisible": [],
            "arch": 80,
            "num_warps": 1,
            "num_stages": 1,
            "options": {},
            "want_sass": False,
        }
        _compile(*_rebuild(request, Path(folder)), request, Path(folder))


def _in_a_child(request: bytes, seconds: float) -> dict:
    """The answer of a child that may use so many seconds of the processor; or how it ended, and what it printed."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result, stderr = folder / "result", folder / "stderr"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _limit(seconds)
                os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)  # MLIR writes there, past Python
                answer = _answer(pickle.loads(request), folder)
                if "error" in answer:
                    answer["error"]["diagnostics"] = stderr.read_text(errors="replace")[-4000:]
                result.write_bytes(pickle.dumps(answer))
                status = 0
            except BaseException:  # what is raised here is no answer; the end says so
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0 and result.exists():
            return pickle.loads(result.read_bytes())
        printed = stderr.read_text(errors="replace")[-2000:] if stderr.exists() else ""
        return {"ended": status, "printed": printed}


def _limit(seconds: float) -> None:
    whole = max(1, round(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(request: dict, folder: Path) -> dict:
    try:
        kernel, constexprs = _rebuild(request, folder)
        return _compile(kernel, constexprs, request, folder)
    except Exception as error:  # every failure of the compiler is an answer
        return {"error": _describe(error)}


def _describe(error: Exception) -> dict:
    # Triton wraps the cause once per call it was inlined into; the innermost error has the sentence, the outermost
    # the line of the kernel itself.
    line = getattr(getattr(error, "node", None), "lineno", None)
    deepest: BaseException = error
    while deepest.__cause__ is not None and type(deepest).__name__ == "CompilationError":
        deepest = deepest.__cause__
    message = getattr(deepest, "error_message", None) or str(deepest) or type(deepest).__name__
    return {"kind": type(deepest).__name__, "message": message, "line_in_kernel": line, "text": str(error)}


# ------------------------------------------------------------------------------------ the kernel, from what was sent


def _rebuild(request: dict, folder: Path) -> tuple[Any, dict]:
    """Writes each namespace to a file (Triton reads a kernel's source from one) and links them by name."""
    spaces = []
    for number, sent in enumerate(request["namespaces"]):
        path = folder / f"namespace_{number}.py"
        lines = []
        for _name, decorator, source in sent["functions"]:
            lines += [f"@{decorator}", source.rstrip("\n"), ""]
        path.write_text("\n".join(lines))
        module = types.ModuleType(f"namespace_{number}")
        module.__file__ = str(path)
        space = vars(module)
        for name in ("triton", "triton.language as tl"):
            exec(f"import {name}", space)
        if any(decorator == "gluon.jit" for _, decorator, _ in sent["functions"]):
            exec("from triton.experimental import gluon", space)
            exec("from triton.experimental.gluon import language as gl", space)
        for name, module_name in sent["modules"].items():
            space[name] = _import(module_name)
        for name, (module_name, qualified) in sent["imports"].items():
            value = _import(module_name)
            for part in qualified.split("."):
                value = getattr(value, part)
            space[name] = value
        for name, value in sent["constants"].items():
            space[name] = _decoded(value)
        sys.modules[module.__name__] = module
        exec(compile(path.read_text(), str(path), "exec"), space)
        spaces.append(space)
    for space, sent in zip(spaces, request["namespaces"]):
        for alias, (number, name) in sent["links"].items():
            space[alias] = spaces[number][name]
    number, name = request["kernel"]
    constexprs = {}
    for parameter, value in request["constexprs"].items():
        link = request["function_constexprs"].get(parameter)
        constexprs[parameter] = spaces[link[0]][link[1]] if link else _decoded(value)
    return spaces[number][name], constexprs


def _import(name: str):
    """Imports a module; of the course's own package, without what its __init__ does for notebooks."""
    top = name.partition(".")[0]
    if top == "course_lib" and top not in sys.modules:
        package = types.ModuleType(top)
        package.__path__ = [str(Path(__file__).resolve().parents[2])]
        sys.modules[top] = package
    return importlib.import_module(name)


def _decoded(value):
    import triton.language as tl

    kind, content = value
    if kind == "constexpr":
        return tl.constexpr(_decoded(content))
    if kind == "dtype":
        return tl.dtype(content)
    return pickle.loads(content)


# ------------------------------------------------------------------------------------------------------ compilation


def _compile(kernel, constexprs: dict, request: dict, folder: Path) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in request["divisible"]}
    source = Source(kernel, request["signature"], constexprs, attributes)
    options = {"num_warps": request["num_warps"], "num_stages": request["num_stages"], **request["options"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = _tool("cuobjdump", "-res-usage", str(cubin))
    # REG and STACK belong to one function; the kernel is the cubin's only entry, called helpers come beside it.
    registers = max(int(count) for count in re.findall(r"REG:(\d+)", usage))
    stack = max(int(count) for count in re.findall(r"STACK:(\d+)", usage))
    result = {
        "name": compiled.metadata.name,
        "registers": registers,
        "stack_bytes": stack,
        "spill_stores": 0,
        "spill_loads": 0,
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "ptx": _text(compiled.asm["ptx"]),
        "sass": None,
        "ttgir": _text(compiled.asm["ttgir"]),
        "triton": triton.__version__,
    }
    if stack or request["want_sass"]:
        sass = _tool("nvdisasm", "-c", str(cubin))
        result["spill_stores"] = len(re.findall(r"\bSTL\b", sass))
        result["spill_loads"] = len(re.findall(r"\bLDL\b", sass))
        result["sass"] = sass if request["want_sass"] else None
    return result


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
