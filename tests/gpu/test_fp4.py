"""Tensors in 4 bits on a GPU: the bits of their meaning, at real sizes and in bfloat16."""

import pytest
import torch

from course_lib.hardware.device import supports_bfloat16
from course_lib.kernels.quantised.fp4 import (
    quantise_mxfp4,
    quantise_mxfp4_reference,
    quantise_nvfp4,
    quantise_nvfp4_reference,
    restore_fp4,
    restore_fp4_reference,
)
from tests.kernels.quantised.test_fp4 import same, wide

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
FORMATS = {
    "mxfp4": (quantise_mxfp4_reference, quantise_mxfp4),
    "nvfp4": (quantise_nvfp4_reference, quantise_nvfp4),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (7, 5000), (2, 8, 1000, 128), (4096, 4096)], ids=str)
def test_the_kernels_make_the_bits_of_their_meaning(form, dtype, shape):
    reference, quantise = FORMATS[form]
    tensor = torch.randn(shape, device="cuda").to(dtype)
    fp4 = quantise(tensor)
    assert same(fp4, reference(tensor))
    for out_dtype in DTYPES:
        restored = restore_fp4(fp4, shape[-1], out_dtype)
        assert torch.equal(restored, restore_fp4_reference(fp4, shape[-1], out_dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_of_every_size_too(form):
    """The smallest of them are below float32's normal numbers, which a GPU must not take for 0."""
    reference, quantise = FORMATS[form]
    tensor = wide(200, 96)
    on_gpu = quantise(tensor.cuda())
    assert same(type(on_gpu)(*(part if part is None else part.cpu() for part in on_gpu)), reference(tensor))
    assert torch.equal(restore_fp4(on_gpu, 96).cpu(), restore_fp4_reference(reference(tensor), 96))
