"""Which Triton this is, and whether it interprets."""

from __future__ import annotations

import numpy as np
import torch


def versions() -> str:
    import triton

    return f"Seen: Triton {triton.__version__}, NumPy {np.__version__}, PyTorch {torch.__version__}."


def interpreting() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
