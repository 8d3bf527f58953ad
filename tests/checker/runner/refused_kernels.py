"""Kernels that Triton's compiler refuses, and a program that asks it why: `python refused_kernels.py WORKER_PROCESS`.

The program prints one JSON object: the name of each kernel to what the judge's child would say of the error. It runs in
a process of its own, without the interpreter, and needs no GPU.
"""

import json
import sys
import tempfile
import textwrap
from pathlib import Path

# What a kernel does to `values`, the tile that it has loaded; or a whole cell.
BODIES = {
    "redefined under an if": "if n > 3:\n    values = values.to(tl.float16)",
    "another dtype in a loop": "total = 0\nfor i in range(0, n):\n    total += tl.load(x + i)\nvalues += total",
    "another shape in a loop": "total = 0.0\nfor i in range(0, n):\n    total += tl.load(x + i + o)\nvalues += total",
    "no power of two": "values += tl.arange(0, 100)",
    "a length at run time": "values += tl.arange(0, n)",
    "two dtypes in a dot": "t = tl.load(x + o[:, None] + o[None, :])\nvalues += tl.sum(tl.dot(t, t.to(tl.float16)), 0)",
    "break": "for i in range(0, n):\n    if i > 3:\n        break\n    values += i",
    "continue": "for i in range(0, n):\n    if i > 3:\n        continue\n    values += i",
    "return in a loop": "for i in range(0, n):\n    if i > 3:\n        return\n    values += i",
    "a name that is not there": "values += tl.load(x + offsets)",
    "a global": "values += tl.arange(0, SIZE)",
    "a name of one branch": "if n > 3:\n    more = tl.load(x + o)\nvalues += more",
    "PyTorch's function": "values = torch.exp(values)",
    "a helper without jit": "values = twice(values)",
    "an element of a tile": "values += values[0]",
    "an element assigned": "values[0] = 1.0",
    "shapes that do not fit": "values += tl.load(x + tl.arange(0, 32))",
    "a keyword that is none": "values = tl.load(x + o, masks=o < n)",
    "too large a tile": "values += tl.sum(tl.load(x + tl.arange(0, 2097152)), 0)",
    "inside a helper": "values = wrong(values)",
}
CELL = """SIZE = 64

def twice(values):
    return 2 * values

@triton.jit
def wrong(values):
    more = values + 1
    return tl.dot(more, more)

@triton.jit
def kernel(x, n, B: tl.constexpr):
    o = tl.arange(0, B)
    values = tl.load(x + o)
{body}
    tl.store(x + o, values)
"""


def cell(name: str) -> str:
    """The whole cell with one of the kernels."""
    return CELL.format(body=textwrap.indent(BODIES[name], "    "))


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import triton
    from answer import Answer, describe_error
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    described = {}
    for name in BODIES:
        with tempfile.TemporaryDirectory() as folder:
            answer = Answer(cell(name), "9.9", Path(folder))
            kernel = answer.run()["kernel"]
            try:
                source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "B": "constexpr"}, {"B": 64})
                triton.compile(source, target=GPUTarget("cuda", 90, 32))
                described[name] = None
            except Exception as error:
                described[name] = describe_error(error, answer.path)
    print(json.dumps(described))


if __name__ == "__main__":
    main()
