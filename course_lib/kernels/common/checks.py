"""What kernels ask of any tensor, and the sentences that they answer with when one does not comply."""

import torch

from course_lib.hardware.device import interpreting

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BFLOAT16_CAPABILITY = (8, 0)


def check_tensor(name: str, tensor, dtypes=None) -> None:
    """Raise ValueError unless `tensor` is one that a kernel can run on here, of a dtype among `dtypes` (None: any)."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}.")
    if interpreting():
        if tensor.dtype == torch.bfloat16 and dtypes is not None:
            raise ValueError(
                f"{name} has dtype torch.bfloat16, with which Triton's interpreter computes wrong numbers; "
                "use torch.float32 or torch.float16 there."
            )
    elif not tensor.is_cuda:
        raise ValueError(
            f"{name} is on device {tensor.device}; a compiled kernel needs a CUDA tensor. Move it with "
            ".to('cuda'), or set TRITON_INTERPRET=1 before Python starts to run kernels on the CPU."
        )


def check_runnable(name, tensor):
    """Raise a ValueError unless Triton can compute here with a tensor of this dtype and device."""
    check_tensor(name, tensor, FLOAT_DTYPES)
    if tensor.dtype == torch.bfloat16 and torch.cuda.get_device_capability(tensor.device) < BFLOAT16_CAPABILITY:
        raise ValueError(
            f"{name} has dtype torch.bfloat16, which {torch.cuda.get_device_name(tensor.device)} has no arithmetic for "
            "(that takes compute capability 8.0); use torch.float16."
        )


def check_dimensions(name: str, tensor, dimensions: str, empty_allowed: bool = False) -> None:
    """Raise a ValueError unless it is a tensor of the dimensions that e.g. "[batch, heads]" names."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if tensor.dim() != dimensions.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {dimensions}.")
    if not empty_allowed and tensor.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which is empty; no dimension may be 0.")


def check_rows(name: str, tensor, dimensions: str, empty_allowed: bool = False) -> None:
    """`check_dimensions` for tensors whose last dimension the kernels read as a contiguous row."""
    check_dimensions(name, tensor, dimensions, empty_allowed)
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; the head dimension must be contiguous "
            f"(stride 1). Call {name}.contiguous() first."
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous. "
            f"Call {name}.contiguous() first."
        )


def check_alike(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless both have one shape, dtype and device."""
    for what in ("shape", "dtype", "device"):
        given, wanted = getattr(tensor, what), getattr(other, what)
        if given != wanted:
            given, wanted = (tuple(given), tuple(wanted)) if what == "shape" else (given, wanted)
            raise ValueError(f"{name} has {what} {given}; it must be that of {other_name}, {wanted}.")


def check_same(name: str, tensor, other_name: str, other, **differing) -> None:
    """Raise a ValueError unless dtype, device and the given pairs (what=(given, wanted)) agree."""
    pairs = {"dtype": (tensor.dtype, other.dtype), "device": (tensor.device, other.device), **differing}
    for what, (given, wanted) in pairs.items():
        if given != wanted:
            raise ValueError(f"{name} has {what.replace('_', ' ')} {given}; it must be that of {other_name}, {wanted}.")


def integer_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's bits as integers: a kernel that only moves data then takes every dtype, in the interpreter too."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    if size not in integers:
        raise ValueError(f"{name} has dtype {tensor.dtype} of {size} bytes; allowed are elements of at most 8 bytes.")
    return tensor.view(integers[size])


def output_like(out: torch.Tensor | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`out` when it fits `tensor` in shape, dtype and device and is contiguous; a new tensor when it is None."""
    if out is None:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is a {type(out).__name__}; it must be a torch.Tensor, or None.")
    check_alike("out", out, name, tensor)
    check_contiguous("out", out)
    return out


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [..., columns] as a matrix [rows, columns] with contiguous rows, without a copy.

    Raises a ValueError where it has no column, or strides that don't allow this.
    """
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have at least one column.")
    columns = tensor.shape[-1]
    if columns > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must be contiguous (stride 1). "
            f"Call {name}.contiguous() first."
        )
    if tensor.numel() == 0:
        return tensor.reshape(0, columns)
    try:
        return tensor.view(-1, columns)
    except RuntimeError as error:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; its leading dimensions do not "
            f"flatten without a copy. Call {name}.contiguous() first."
        ) from error
