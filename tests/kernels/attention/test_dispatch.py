"""Which attention kernel runs is decided by what the machine and the inputs allow, and is always explained."""

import sys

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention import dispatch
from course_lib.kernels.attention.dispatch import choose
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.gluon import limits as gluon_limits
from course_lib.kernels.gluon.limits import gpu_refusal, missing_gluon
from course_lib.kernels.hopper.limits import hopper_refusal, input_refusal

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="about a machine on which kernels are interpreted")


def inputs(*, length=40, heads=2, key_heads=2, head_dim=32, dtype=torch.float16):
    query = torch.randn(1, heads, length, head_dim).to(dtype)
    key, value = (torch.randn(1, key_heads, length, head_dim).to(dtype) for _ in range(2))
    return query, key, value


@pytest.fixture
def gpu(monkeypatch):
    """Says that device "cuda" is a GPU of the given capability and name; nothing runs on it."""

    def pretend(capability, name):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        gpu_refusal.cache_clear()
        return torch.device("cuda")

    yield pretend
    gpu_refusal.cache_clear()


# ------------------------------------------------------------------------------------------- without a Hopper GPU


@needs_interpreter
def test_in_the_interpreter_the_portable_kernel_runs_and_the_reason_is_said():
    choice = choose(*inputs())
    assert choice.kernel == "portable"
    assert "interpreter" in choice.reason


@needs_interpreter
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 5}, {"scale": 0.3}], ids=str)
def test_what_is_chosen_computes_attention(options):
    query, key, value = inputs(heads=4, key_heads=2, dtype=torch.float32)
    output, lse = attention(query, key, value, return_lse=True, **options)
    exact, exact_lse = attention_reference(query.double(), key.double(), value.double(), return_lse=True, **options)
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "head_dim, options, kernel",
    [
        (64, {"causal": True, "window": 255}, "portable"),
        (64, {"causal": True, "window": 256}, "hopper"),
        (64, {"window": 63}, "hopper"),
        (64, {"causal": True}, "hopper"),
        (128, {"causal": True, "window": 63}, "hopper"),
    ],
)
def test_a_narrow_window_of_small_heads_is_faster_in_plain_triton(monkeypatch, head_dim, options, kernel):
    monkeypatch.setattr(dispatch, "hopper_refusal", lambda *inputs: None)
    assert choose(*inputs(head_dim=head_dim), **options).kernel == kernel


@needs_interpreter
def test_asked_for_directly_without_its_machine_the_hopper_kernel_says_what_to_use():
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    with pytest.raises(RuntimeError, match="interpreter here.*flash_attention takes these inputs"):
        flash_attention_hopper(*inputs())


def test_another_gpu_is_refused_by_its_name(gpu):
    error, reason = gpu_refusal(gpu((8, 0), "NVIDIA A100"))
    assert error is RuntimeError
    assert "NVIDIA A100 has compute capability 8.0" in reason and "9.0" in reason
    assert gpu_refusal(torch.device("cuda", 1)).error is RuntimeError


def test_blackwell_is_no_hopper(gpu):
    """Its compute capability is higher, but wgmma is gone there: a check for "at least 9.0" would launch and fail."""
    assert "10.0" in gpu_refusal(gpu((10, 0), "NVIDIA B200")).reason


def test_a_hopper_gpu_is_taken(gpu):
    assert gpu_refusal(gpu((9, 0), "NVIDIA H200")) is None


def test_a_triton_without_gluon_is_a_reason_and_no_crash(gpu, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("triton.experimental.gluon")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    monkeypatch.delitem(sys.modules, "course_lib.kernels.gluon.names", raising=False)
    assert "lacks a part of Gluon" in missing_gluon()
    error, reason = gpu_refusal(gpu((9, 0), "NVIDIA H200"))
    assert error is RuntimeError and "install Triton" in reason


def test_a_triton_whose_gluon_lacks_a_name_is_a_reason(monkeypatch):
    from triton.experimental.gluon.language.nvidia.hopper import tma

    monkeypatch.delattr(tma, "store_wait")
    monkeypatch.delitem(sys.modules, "course_lib.kernels.gluon.names", raising=False)
    assert "store_wait" in missing_gluon()


def test_the_machine_is_asked_before_the_inputs(monkeypatch):
    monkeypatch.setattr(gluon_limits, "interpreting", lambda: True)
    assert hopper_refusal(*inputs(dtype=torch.float32)).error is RuntimeError


# ---------------------------------------------------------------------------------------- what the copy engine asks


def test_half_precision_inputs_are_taken():
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (16, 64, 80, 96, 128, 256):
            assert input_refusal(*inputs(head_dim=head_dim, dtype=dtype)) is None


def test_heads_after_the_length_in_memory_are_taken():
    query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs())
    assert input_refusal(query, key, value) is None


def test_float32_is_refused():
    error, reason = input_refusal(*inputs(dtype=torch.float32))
    assert error is ValueError
    assert "torch.float32" in reason and "torch.float16 and torch.bfloat16" in reason


def test_an_address_off_by_an_element_is_refused():
    query, key, value = inputs()
    shifted = torch.empty(key.numel() + 1, dtype=key.dtype)[1:].view(key.shape)
    error, reason = input_refusal(query, shifted, value)
    assert error is ValueError
    assert reason.startswith("key begins 2 bytes after a multiple of 16")


@pytest.mark.parametrize(("which", "dimension", "name"), [(0, 2, "length"), (1, 1, "head"), (2, 2, "length")])
def test_a_stride_that_is_no_multiple_of_16_bytes_is_refused_by_name(which, dimension, name):
    tensors = list(inputs())
    shape = list(tensors[which].shape)
    shape[3 if dimension == 2 else 2] += 1 if dimension == 2 else 0
    if dimension == 2:
        wide = torch.empty(shape, dtype=torch.float16)[..., :32]
    else:
        wide = torch.empty(1, 2, 40 * 32 + 4, dtype=torch.float16)[..., : 40 * 32].unflatten(2, (40, 32))
    tensors[which] = wide
    error, reason = input_refusal(*tensors)
    assert error is ValueError
    assert f"{('query', 'key', 'value')[which]} has stride" in reason and f"{name} dimension" in reason


def test_a_broadcast_dimension_is_refused():
    """An expanded tensor steps over it with stride 0, which the copy engine doesn't know."""
    query, key, value = inputs()
    assert "stride 0 in its head dimension" in input_refusal(query, key[:, :1].expand(1, 2, 40, 32), value).reason


def test_the_stride_of_a_dimension_of_one_element_is_no_obstacle():
    query, key, value = inputs(length=1)
    assert input_refusal(query.as_strided(query.shape, (3, 32, 5, 1)), key, value) is None


def test_rows_of_an_odd_number_of_bytes_are_refused():
    """Inputs may stride over a padded row, but the output is contiguous."""
    query, key, value = (torch.empty(1, 2, 40, 32, dtype=torch.float16)[..., :20] for _ in range(3))
    assert "head dimension 20" in input_refusal(query, key, value).reason


def test_a_descriptor_made_from_a_known_one_describes_its_own_tensor():
    """Descriptors are made once for a shape; one that kept the first tensor's address would read freed memory."""
    from course_lib.kernels.hopper.launch import descriptor

    first, second = (torch.empty(2, 3, 40, 64, dtype=torch.float16) for _ in range(2))
    described = [descriptor(tensor, 64, 64) for tensor in (first, second, first.transpose(1, 2))]
    assert [one.base.data_ptr() for one in described] == [first.data_ptr(), second.data_ptr(), first.data_ptr()]
    assert described[1].shape == [2, 3, 40, 64] and described[2].shape == [2, 40, 3, 64]
    assert described[2].strides == [7680, 64, 2560, 1]
    assert described[0].block_shape == [1, 1, 64, 64]


def test_a_descriptor_says_nothing_odd_of_a_dimension_of_one_element():
    from course_lib.kernels.hopper.launch import descriptor

    tensor = torch.empty(1, 2, 40, 32, dtype=torch.float16)
    assert descriptor(tensor.as_strided(tensor.shape, (3, 1280, 32, 1)), 64, 64).strides == [64, 1280, 32, 1]


# --------------------------------------------------------------------------------------------- errors, the same ones


@needs_interpreter
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": torch.zeros(1, 2, 40, 48, dtype=torch.float16)}, "key has head dimension 48"),
        ({"value": torch.zeros(1, 2, 41, 32, dtype=torch.float16)}, "value has shape"),
        ({"query": torch.zeros(1, 3, 40, 32, dtype=torch.float16)}, "query has 3 heads"),
        ({"window": -1}, "window is -1"),
        ({"scale": -0.5}, "scale is -0.5"),
        ({"sink": torch.zeros(3)}, "sink has 3 numbers"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_bad_input_gets_one_answer_from_all(change, words):
    from course_lib.kernels.attention.flash import flash_attention
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    arguments = dict(zip(("query", "key", "value"), inputs())) | change
    for function in (choose, attention, flash_attention, flash_attention_hopper):
        with pytest.raises(ValueError, match=words):
            function(**arguments)
