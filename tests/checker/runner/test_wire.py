"""Values cross between judge and worker unchanged, and nothing in a message can run."""

import json
import math
import pickle
import struct

import numpy as np
import pytest
import torch

from course_lib.checker.runner.process import wire


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(10**40),
        2.5,
        math.inf,
        "text ·",
        (1, [2.0, "x"], {"a": (None,), 3: False}),
        torch.float16,
        (),
    ],
)
def test_plain_values_come_back_as_they_were(value):
    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = (torch.randn(shape) * 10).to(dtype)
    back = wire.decode(wire.encode(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_strides_and_what_lies_in_the_gaps_survive():
    wide = torch.arange(24.0).reshape(4, 6)
    view = wide[:, 1:4]
    back = wire.decode(wire.encode(view))
    assert back.stride() == view.stride() and torch.equal(back, view)
    transposed = wire.decode(wire.encode(wide.t()))
    assert transposed.stride() == (1, 6) and torch.equal(transposed, wide.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_may_have_any_stride(dtype, shape):
    """Such a tensor counts as contiguous, and its bytes could not be had: "the checker itself failed"."""
    wide = torch.arange(12).to(dtype)
    view = torch.as_strided(wide, shape, tuple(5 - dimension for dimension in range(len(shape))), 3)
    back = wire.decode(wire.encode(view))
    assert back.shape == view.shape and back.dtype == dtype and back.item() == 3


def test_nan_payloads_survive():
    poison = torch.tensor([0x7FC5_DEAD], dtype=torch.int32).view(torch.float32)
    assert wire.decode(wire.encode(poison)).view(torch.int32).item() == 0x7FC5_DEAD


def test_numpy_values_are_understood():
    assert wire.decode(wire.encode(np.float32(2.5))) == 2.5
    assert torch.equal(wire.decode(wire.encode(np.arange(3))), torch.arange(3))


class _Lazy(torch.Tensor):
    pass


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, torch.ones(2).as_subclass(_Lazy), b"bytes"])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(wire.WireError, match="a value of type"):
        wire.encode(value)


def _forged(body, sizes=()):
    header = json.dumps({"body": body, "sizes": list(sizes)}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00",
        pickle.dumps(print),
        struct.pack("<Q", 1 << 60),
        _forged({"code": "1"}),
        _forged([1]),
        _forged({}),
        _forged({"tensor": {"dtype": "float32", "shape": [4], "strides": None, "buffer": 0}}, [8]),
        _forged({"tensor": {"dtype": "float32", "shape": [2], "strides": [1 << 40], "buffer": 0}}, [0]),
        _forged({"tensor": {"dtype": "float32", "shape": [-1], "strides": None, "buffer": 0}}, [0]),
        _forged({"tensor": {"dtype": "object", "shape": [], "strides": None, "buffer": 0}}, [0]),
    ],
)
def test_a_forged_message_is_an_error_and_nothing_else(message):
    with pytest.raises(wire.WireError):
        wire.decode(message)
