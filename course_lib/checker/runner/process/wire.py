"""Values on their way between judge and worker: JSON and raw bytes, never pickle.

The worker runs strangers' code, so what comes back from it must not be able to run anything here. Self-contained
(standard library and torch), because the worker loads this file without the rest of the course.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
    )
}


LayOut = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]  # the same values with these strides

LARGEST = 3 << 30  # bytes of one tensor; one whose strides are 0 would be small on the way and larger at the end


SPARSE = 1 << 22  # elements of a storage that is sent although most of it lies between a tensor's own


class WireError(ValueError):
    """A value of a kind that cannot be sent, or a message that is not one."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements, in order, as bytes."""
    packed = tensor.detach().contiguous()
    # One element is contiguous with any stride, and keeps it through `reshape`; `view` asks for a stride of 1.
    return packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)


def _raw(tensor: torch.Tensor) -> memoryview:
    return as_bytes(tensor).numpy().data


def _pack(value, buffers: list[torch.Tensor], depth: int = 0, apart: bool = False):
    """A value as JSON, with its tensors put into `buffers`."""
    if depth > 16:
        raise WireError("a value nested more than 16 deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"int": str(int(value))}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout != torch.strided:
            raise WireError(f"a tensor of dtype {value.dtype} and layout {value.layout}")
        if value.numel() * value.element_size() > LARGEST:
            raise WireError(f"a tensor of {value.numel():,} elements")
        cpu = value.detach().cpu().resolve_conj().resolve_neg()
        strides: list[int] | None = list(cpu.stride())
        # Inputs keep their strides and their storage, gaps and all; what is mostly gap, and large, is sent packed.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(cpu.shape, cpu.stride())) if cpu.numel() else 0
        far = apart and extent > max(4 * cpu.numel(), SPARSE)
        if not cpu.numel() or extent > max(4 * cpu.numel(), SPARSE):
            packed, strides = cpu.contiguous(), strides if far else None
        else:
            packed = torch.as_strided(cpu, (extent,), (1,), cpu.storage_offset())
        buffers.append(packed)
        body = {"dtype": name, "shape": list(cpu.shape), "strides": strides, "buffer": len(buffers) - 1}
        return {"far" if far else "tensor": body}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(item, buffers, depth + 1, apart) for item in value]}
    if isinstance(value, dict):
        pairs = [[_pack(half, buffers, depth + 1, apart) for half in pair] for pair in value.items()]
        return {"dict": pairs}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy scalars
        return _pack(value.item(), buffers, depth + 1)
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return _pack(torch.from_numpy(value.copy()), buffers, depth + 1)
    raise WireError(f"a value of type {type(value).__name__}")


def _unpack(node, buffers: list[memoryview], lay_out: LayOut | None):
    if not isinstance(node, dict):
        if node is None or isinstance(node, (bool, str)):
            return node
        raise WireError("a malformed message")
    ((kind, body),) = node.items()
    if kind == "int":
        return int(body) if len(body) < 4000 else math.inf
    if kind == "float":
        return float(body)
    if kind == "dtype":
        return _DTYPES[body]
    if kind in ("tuple", "list"):
        items = [_unpack(item, buffers, lay_out) for item in body]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_unpack(key, buffers, lay_out): _unpack(item, buffers, lay_out) for key, item in body}
    if kind == "tensor":
        return _unpack_tensor(body, buffers)
    if kind == "far" and lay_out is not None:
        strides = tuple(map(int, body["strides"]))
        return lay_out(_unpack_tensor(body | {"strides": None}, buffers), strides)
    raise WireError(f"a malformed message ({kind!r})")


def _unpack_tensor(body, buffers):
    dtype, shape, strides = _DTYPES[body["dtype"]], tuple(map(int, body["shape"])), body["strides"]
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize > LARGEST:
        raise WireError("a malformed tensor")
    data = buffers[body["buffer"]]
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    if strides is None:
        if flat.numel() != math.prod(shape):
            raise WireError("a malformed tensor")
        return flat.reshape(shape)
    extent = 1 + sum((size - 1) * int(stride) for size, stride in zip(shape, strides)) if math.prod(shape) else 0
    if extent > flat.numel() or any(int(stride) < 0 for stride in strides):
        raise WireError("a malformed tensor")
    return torch.as_strided(flat, shape, tuple(map(int, strides)))


def encode(value, apart: bool = False) -> bytes:
    """One message: the length of a JSON header, the header, then the tensors' bytes.

    A tensor that is mostly gaps, and large, arrives without them. With `apart` it keeps its strides, and `decode` needs
    to be told how to lay it out.

    Raises:
        WireError: a value that is not a tensor, number, string, None, or a tuple, list or dict of these.
    """
    tensors: list[torch.Tensor] = []
    body = _pack(value, tensors, apart=apart)
    buffers = [_raw(tensor) for tensor in tensors]
    header = json.dumps({"body": body, "sizes": [len(buffer) for buffer in buffers]}).encode()
    return b"".join([struct.pack("<Q", len(header)), header, *buffers])


def verify(value) -> None:
    """Nothing, for a value that `encode` takes.

    Raises:
        WireError: as `encode`.
    """
    _pack(value, [])


def decode(message: bytes, lay_out: LayOut | None = None):
    """The value of a message.

    Args:
        message: what `encode` made.
        lay_out: lays out the tensors that kept their strides although these are mostly gaps; refused where it is None.
            Only what is trusted may choose the size of memory here.

    Raises:
        WireError: the bytes are not a message that `encode` makes.
    """
    try:
        (length,) = struct.unpack_from("<Q", message)
        view = memoryview(message)
        header = json.loads(bytes(view[8 : 8 + length]))
        buffers, start = [], 8 + length
        for size in header["sizes"]:
            if not isinstance(size, int) or size < 0 or start + size > len(message):
                raise WireError("a malformed message: sizes do not fit")
            buffers.append(view[start : start + size])
            start += size
        return _unpack(header["body"], buffers, lay_out)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"a malformed message ({type(error).__name__})") from error
