"""An answer's kernels before Triton's compiler, in a process that does not interpret them.

Triton's interpreter is Python, and runs what no GPU can: a variable that changes its type in a loop, a `break`, a call
of PyTorch on a tile. The compiler's front end refuses such a kernel within milliseconds and needs no GPU. Only its word
on the kernel itself counts here; whatever else goes wrong, the answer is not refused.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import re
import time
import types
from pathlib import Path
from typing import cast

from answer import Answer, describe_error

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def read(traffic, job: dict, folder: Path) -> dict:
    """Have the compiler read a job's kernels, up to the first that it refuses.

    Returns:
        A frame: the places in the job of those that it takes, and of the one that it refuses with what it says; places
        that are missing are of kernels about which it could not be asked.
    """
    frame: dict = {"kind": "compiled", "taken": [], "refused": None, "error": None}
    if traffic is None or not traffic.front_end_is_known():
        return frame
    answer = Answer(job["source"], job["exercise"], folder)
    started = time.monotonic()
    tree, code = _run(answer)
    namespace = answer.module.__dict__
    for index, variant in enumerate(job["compile"]):
        if time.monotonic() - started > job["compile_seconds"]:
            break
        with contextlib.suppress(Exception):  # a kernel that cannot be found, or that the compiler was not asked about

            def function(name, line):
                return traffic.find_function(namespace, code, name, line)

            error = traffic.refusal(variant, function)
            if error is None:
                frame["taken"].append(index)
            elif not _for_want_of_a_global(error, tree, code, namespace):
                return {**frame, "refused": index, "error": describe_error(error, answer.path)}
    return frame


def _run(answer: Answer) -> tuple[ast.Module, types.CodeType]:
    """Run the cell statement by statement: one that launches a kernel fails here, and the others define theirs."""
    path = str(answer.path)
    tree = ast.parse(answer.source, path)
    whole = compile(answer.source, path, "exec", dont_inherit=True)
    for statement in tree.body:
        module = ast.Module([statement], [])
        with contextlib.suppress(BaseException):  # also exit()
            exec(compile(module, path, "exec", whole.co_flags & _FUTURES, True), answer.module.__dict__)
    return tree, whole


def _for_want_of_a_global(error: BaseException, tree: ast.Module, code: types.CodeType, namespace: dict) -> bool:
    """Whether a kernel was refused only because a name of the cell has no value, or another one, than at the launch.

    So it is where the statement that defines the name failed here, and where the launcher itself sets it.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    set_by_one, read_by_another = set(), set()
    for function in functions:
        inside = list(ast.walk(function))
        declared = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
        set_by_one |= declared
        read_by_another |= {node.id for node in inside if isinstance(node, ast.Name)} - declared
    if set_by_one & read_by_another:
        return True
    kernels = {function.name for function in functions if function.decorator_list}
    locals_ = (inner.co_varnames for inner in _codes(code) if inner.co_name in kernels)
    known = {*namespace, *dir(builtins)}.union(*locals_)
    words, cause = "", cast("BaseException | None", error)
    while cause is not None and len(words) < 1 << 20:  # the causes: a helper's error, in the error of its caller
        words, cause = f"{words}\n{cause}", cause.__cause__
    return bool(set(re.findall(r"NameError\(['\"](\w+) is not defined", words)) - known)


def _codes(code: types.CodeType):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
