"""Where in the source a kernel is."""

import functools
import os
import sys
import types

import numpy as np

_HERE = os.path.dirname(os.path.abspath(__file__))
_KNOWN_KERNELS = os.path.join(_HERE, "known_kernels.py")


def kernel_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither this folder's, Triton's nor NumPy's: the kernel's own."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


@functools.lru_cache(maxsize=1024)
def is_own(filename: str) -> bool:
    """Whether a line of this file is a kernel's or a launcher's: neither this folder's, Triton's nor NumPy's."""
    import triton

    foreign = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (triton, np))
    file = os.path.abspath(filename)
    return file == _KNOWN_KERNELS or not file.startswith((*foreign, _HERE + os.sep))
