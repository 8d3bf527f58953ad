"""What every attention launcher asks of its arguments, and the sentences it answers with when they don't comply."""

import math

import torch

from course_lib.kernels.common.checks import check_contiguous, check_dimensions, check_runnable

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def check_attention_inputs(query, key, value, *, window=None, scale=None, sink=None):
    """Raise a ValueError, naming argument, value and what is allowed, unless a kernel can run on these.

    Shapes: query [batch, query_heads, query_length, head_dim]; key, value [batch, key_heads, key_length, head_dim].
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have the four dimensions "
                "[batch, heads, length, head_dim]."
            )
        if tensor.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which is empty; no dimension may be 0.")
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; the head dimension must be contiguous "
                f"(stride 1). Call {name}.contiguous() first."
            )
    check_runnable("query", query)  # and with it key and value, which must be alike
    for name, tensor in (("key", key), ("value", value)):
        for what, given, wanted in (
            ("dtype", tensor.dtype, query.dtype),
            ("device", tensor.device, query.device),
            ("batch size", tensor.shape[0], query.shape[0]),
            ("head dimension", tensor.shape[3], query.shape[3]),
        ):
            if given != wanted:
                raise ValueError(f"{name} has {what} {given}; it must be that of query, {wanted}.")
    if key.shape != value.shape:
        raise ValueError(
            f"value has shape {tuple(value.shape)}; its heads and length must be those of key, {tuple(key.shape)}."
        )
    if query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"query has {query.shape[1]} heads; it must have a multiple of the {key.shape[1]} that key and value have."
        )
    if not MIN_HEAD_DIM <= query.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"query has head dimension {query.shape[3]}; supported are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}.")
    check_window_and_scale(window, scale)
    check_sink(sink, query)


def check_sink(sink, query) -> None:
    """Raise a ValueError unless sink is None or one number for each head of query [batch, query_heads, ...]."""
    if sink is None:
        return
    check_dimensions("sink", sink, "[query_heads]")
    if len(sink) != query.shape[1]:
        raise ValueError(f"sink has {len(sink)} numbers; it must have one for each of query's {query.shape[1]} heads.")
    if sink.dtype not in (torch.float32, query.dtype):
        allowed = " and ".join(sorted({"torch.float32", str(query.dtype)}))
        raise ValueError(f"sink has dtype {sink.dtype}; for this query it may be {allowed}.")
    if sink.device != query.device:
        raise ValueError(f"sink has device {sink.device}; it must be that of query, {query.device}.")
    check_contiguous("sink", sink)


def check_window(window):
    """Raise a ValueError unless window is None or a number of keys."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise ValueError(f"window is {window!r}; it must be None (no limit) or an int of at least 0, a number of keys.")


def check_window_and_scale(window, scale):
    """Raise a ValueError unless window is None or a number of keys, and scale None or a number above 0."""
    check_window(window)
    # The running maximum is taken over raw scores and scaled afterwards: a negative scale would turn their order round,
    # and 0 would make NaN of the -inf that hides a key.
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale!r}; it must be finite and above 0. For a negative one, pass -query.")


def check_backward_inputs(query, output, log_sum_exp, output_gradient, log_sum_exp_gradient=None):
    """Raise a ValueError, naming argument, value and what is allowed, unless these belong to a forward on `query`."""
    rows = query.shape[:3]
    wanted = [
        ("output", output, query.shape, query.dtype),
        ("output_gradient", output_gradient, query.shape, query.dtype),
        ("log_sum_exp", log_sum_exp, rows, torch.float32),
    ]
    if log_sum_exp_gradient is not None:
        wanted.append(("log_sum_exp_gradient", log_sum_exp_gradient, rows, torch.float32))
    for name, tensor, shape, dtype in wanted:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
        for what, given, due in (
            ("shape", tuple(tensor.shape), tuple(shape)),
            ("dtype", tensor.dtype, dtype),
            ("device", tensor.device, query.device),
        ):
            if given != due:
                raise ValueError(f"{name} has {what} {given}; for this query it must be {due}.")
