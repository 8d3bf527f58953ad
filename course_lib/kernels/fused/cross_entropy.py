"""Cross-entropy over rows of logits and its gradient, online over chunks of the vocabulary; both at once in place.

    loss[r]        = log total[r] + maximum[r] - logits[r, targets[r]]        0 where targets[r] is ignore_index
    gradient[r, v] = (exp(logits[r, v] - maximum[r]) / total[r] - [v = targets[r]]) · loss_gradient[r]
    maximum[r] = max over v of logits[r, v],    total[r] = Σ_v exp(logits[r, v] - maximum[r])

                          reads  writes   elements moved for each logit
    forward                 1      0            1
    backward                1      1            2        from the maximum and the total, 8 bytes a row
    both, in place          2      1            3        one launch; part of the second read comes from the L2 cache

FLOPs: about 8 per logit. A row of Llama 3's 128,256 logits is 256 KB in 16 bits, as much as all registers of a
multiprocessor: it does not stay there, so its gradient reads it again. In one launch that follows at once.
`cuda_cross_entropy.py` spreads it over eight blocks, and reads it once.

In place nothing of the logits' size is allocated, and the logits are gone afterwards. It needs the gradient of the loss
beforehand: 1 / (targets that count) for a mean.

The maximum and the total are kept apart. Their log-sum-exp is one number less, and its rounding, 0.0005 where logits
are near 10,000, would be an error of that size in each probability.

A target outside the vocabulary never reads outside of its row. Checked (`validate`), it is refused; unchecked, its loss
and its gradient are NaN. A row that is ignored is not read.

Source: Milakov and Gimelshein, arXiv 1805.02867 (the online sum).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import check_indices
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.softmax.rows import exponential

GROUP = 8  # neighbouring logits of one thread, which share a running maximum
LANES, NUM_WARPS = 1024, 32
IGNORE_INDEX = -100


def cross_entropy_reference(logits, targets, ignore_index=IGNORE_INDEX):
    """The plain PyTorch meaning: losses [rows] of logits [rows, vocabulary], in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.long(), ignore_index=ignore_index, reduction="none")


def cross_entropy_backward_reference(logits, targets, loss_gradient, ignore_index=IGNORE_INDEX):
    """The plain PyTorch meaning of the gradient, [rows, vocabulary], in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = (targets != ignore_index)[:, None]
    hot = F.one_hot(torch.where(targets == ignore_index, 0, targets).long(), logits.shape[1])
    gradient = (torch.softmax(wide, -1) - hot) * loss_gradient[:, None].to(wide.dtype)
    return torch.where(counts, gradient, 0).to(logits.dtype)


@triton.jit
def maximum_and_total(row_pointer, vocabulary, LANES: tl.constexpr, GROUP: tl.constexpr):
    """The maximum of a row, and the sum of exp(logit - maximum), in one pass.

    Each lane takes GROUP neighbours at a time and keeps the maximum and the sum of what it has met: one rescaling, an
    exponential, for GROUP logits. The lanes are merged at the end.
    """
    offsets = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [LANES, GROUP]
    running_max = tl.full([LANES], float("-inf"), tl.float32)
    running_sum = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, vocabulary, LANES * GROUP):
        column = start + offsets
        logits = tl.load(row_pointer + column, mask=column < vocabulary, other=float("-inf"),
                         eviction_policy="evict_last").to(tl.float32)  # [LANES, GROUP]  # fmt: skip
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))  # [LANES]
        weights = exponential(logits, new_max[:, None])  # [LANES, GROUP]
        running_sum = running_sum * exponential(running_max, new_max) + tl.sum(weights, axis=1)
        running_max = new_max
    maximum = tl.max(running_max, axis=0)
    return maximum, tl.sum(running_sum * exponential(running_max, maximum), axis=0)


@triton.jit
def loss_of_row(row_pointer, target, vocabulary, maximum, total):
    """The loss of a row; NaN for a target that is outside of it, which is not read."""
    exists = (target >= 0) & (target < vocabulary)
    logit = tl.load(row_pointer + target, mask=exists, other=0.0).to(tl.float32)
    # In this order the large numbers cancel first.
    return tl.where(exists, tl.log(total) + (maximum - logit), float("nan"))


@triton.jit
def write_gradient(
    row_pointer, gradient_row, target, vocabulary, maximum, total, scale, LANES: tl.constexpr, GROUP: tl.constexpr
):
    """Write (softmax - one-hot) · scale of a row; both pointers may be the same."""
    exists = (target >= 0) & (target < vocabulary)
    scale = tl.where(exists, scale, float("nan"))
    weight_scale = scale / total
    for start in tl.range(0, vocabulary, LANES * GROUP):
        column = start + tl.arange(0, LANES * GROUP)  # [LANES · GROUP]
        inside = column < vocabulary
        logits = tl.load(row_pointer + column, mask=inside, other=float("-inf"), eviction_policy="evict_first")
        gradient = exponential(logits.to(tl.float32), maximum) * weight_scale - tl.where(column == target, scale, 0.0)
        tl.store(gradient_row + column, gradient.to(gradient_row.dtype.element_ty), mask=inside,
                 eviction_policy="evict_first")  # fmt: skip


@triton.jit
def write_zeros(gradient_row, vocabulary, BLOCK: tl.constexpr):
    """The gradient of a row that is ignored."""
    for start in tl.range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        tl.store(gradient_row + column, tl.zeros([BLOCK], gradient_row.dtype.element_ty), mask=column < vocabulary)


@triton.jit
def cross_entropy_kernel(
    logits_pointer,
    targets_pointer,
    losses_pointer,
    statistics_pointer,
    vocabulary,
    logits_stride,
    ignore_index,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: the loss of one row. statistics_pointer: float32 [rows, 2], the maximum and the total."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_pointer + row).to(tl.int64)
    loss = 0.0
    maximum = 0.0
    total = 1.0
    if target != ignore_index:
        logits_row = logits_pointer + row * logits_stride
        maximum, total = maximum_and_total(logits_row, vocabulary, LANES, GROUP)
        loss = loss_of_row(logits_row, target, vocabulary, maximum, total)
    tl.store(losses_pointer + row, loss)
    tl.store(statistics_pointer + 2 * row, maximum)
    tl.store(statistics_pointer + 2 * row + 1, total)


@triton.jit
def cross_entropy_backward_kernel(
    logits_pointer,
    targets_pointer,
    statistics_pointer,
    loss_gradient_pointer,
    gradient_pointer,
    vocabulary,
    logits_stride,
    loss_gradient_stride,
    gradient_stride,
    ignore_index,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: the gradient of one row, from its maximum and total."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_pointer + row).to(tl.int64)
    gradient_row = gradient_pointer + row * gradient_stride
    if target == ignore_index:
        write_zeros(gradient_row, vocabulary, LANES * GROUP)
    else:
        maximum = tl.load(statistics_pointer + 2 * row)
        total = tl.load(statistics_pointer + 2 * row + 1)
        scale = tl.load(loss_gradient_pointer + row * loss_gradient_stride).to(tl.float32)
        write_gradient(logits_pointer + row * logits_stride, gradient_row, target, vocabulary, maximum, total, scale,
                       LANES, GROUP)  # fmt: skip


@triton.jit
def cross_entropy_in_place_kernel(
    logits_pointer,
    targets_pointer,
    losses_pointer,
    loss_gradient_pointer,
    vocabulary,
    logits_stride,
    loss_gradient_stride,
    ignore_index,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: the loss of one row, and its gradient over its logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_pointer + row).to(tl.int64)
    logits_row = logits_pointer + row * logits_stride
    loss = 0.0
    if target == ignore_index:
        write_zeros(logits_row, vocabulary, LANES * GROUP)
    else:
        maximum, total = maximum_and_total(logits_row, vocabulary, LANES, GROUP)
        loss = loss_of_row(logits_row, target, vocabulary, maximum, total)
        scale = tl.load(loss_gradient_pointer + row * loss_gradient_stride).to(tl.float32)
        tl.debug_barrier()  # every thread has read the target's logit before one of them overwrites it
        write_gradient(logits_row, logits_row, target, vocabulary, maximum, total, scale, LANES, GROUP)
    tl.store(losses_pointer + row, loss)


def cross_entropy_forward(logits, targets, ignore_index=IGNORE_INDEX, validate=True):
    """(losses, statistics) by a kernel, without a gradient; `cross_entropy_operators.cross_entropy` has one.

    Args:
        logits: [..., rows, vocabulary], float32, float16 or bfloat16, with a contiguous last dimension and
            leading dimensions that flatten without a copy.
        targets: int32 or int64 [..., rows], contiguous: 0 to vocabulary - 1, or ignore_index.
        ignore_index: the target of rows that don't count; any integer.
        validate: read `targets` from the device and check them, which waits for it. With False nothing waits; a target
            outside the vocabulary then has the loss NaN.

    Returns:
        losses float32 [..., rows], 0 where ignored, and statistics float32 [..., rows, 2], the maximum and
            the total of each row.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    rows = check(logits, targets, ignore_index, validate)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    statistics = torch.empty(*targets.shape, 2, dtype=torch.float32, device=logits.device)
    if rows.shape[0] > 0:
        cross_entropy_kernel[(rows.shape[0],)](
            rows, targets, losses, statistics, rows.shape[1], rows.stride(0), ignore_index, **settings(rows.shape[1])
        )
    return losses, statistics


def cross_entropy_backward(logits, targets, statistics, loss_gradient, ignore_index=IGNORE_INDEX):
    """The gradient of the losses with respect to the logits, contiguous, of their shape and dtype.

    Args:
        logits, targets, ignore_index: as given to the forward pass, which has checked what the targets say.
        statistics: float32 [..., rows, 2], as the forward pass returned it.
        loss_gradient: float32 [..., rows], of any strides.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    rows = check(logits, targets, ignore_index, validate=False)
    check_tensor("statistics", statistics, (torch.float32,))
    if statistics.shape != (*targets.shape, 2) or not statistics.is_contiguous():
        raise ValueError(
            f"statistics has shape {tuple(statistics.shape)} and strides {statistics.stride()}; it must be what the "
            f"forward pass returned, contiguous {(*targets.shape, 2)}."
        )
    scales = check_loss_gradient(loss_gradient, targets)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if rows.shape[0] > 0:
        cross_entropy_backward_kernel[(rows.shape[0],)](
            rows, targets, statistics, scales, gradient, rows.shape[1], rows.stride(0), scales.stride(0),
            rows.shape[1], ignore_index, **settings(rows.shape[1]),
        )  # fmt: skip
    return gradient


def cross_entropy_forward_backward_(logits, targets, loss_gradient, ignore_index=IGNORE_INDEX, validate=True):
    """losses, float32 [..., rows]; the logits are overwritten by their gradient.

    Args:
        logits, targets, ignore_index, validate: as for `cross_entropy_forward`; no two logits may share their memory.
        loss_gradient: float32 [..., rows], of any strides: what each loss counts for.

    Raises:
        ValueError: an argument is not as above; the message names it. Nothing is written then.
    """
    rows = check(logits, targets, ignore_index, validate)
    check_rows_apart(rows, logits)
    scales = check_loss_gradient(loss_gradient, targets)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    if rows.shape[0] > 0:
        cross_entropy_in_place_kernel[(rows.shape[0],)](
            rows, targets, losses, scales, rows.shape[1], rows.stride(0), scales.stride(0), ignore_index,
            **settings(rows.shape[1]),
        )  # fmt: skip
    return losses


def settings(vocabulary: int) -> dict[str, int]:
    """Lanes and warps: those of a long row, or as few as a short one needs."""
    lanes = min(LANES, max(32, triton.next_power_of_2(triton.cdiv(vocabulary, GROUP))))
    return {"LANES": lanes, "GROUP": GROUP, "num_warps": min(NUM_WARPS, lanes // 32)}


def check(logits, targets, ignore_index, validate: bool) -> torch.Tensor:
    """The logits as rows, after what all launchers ask of their arguments."""
    check_tensor("logits", logits, FLOAT_DTYPES)
    rows = as_rows("logits", logits)
    if logits.dim() < 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [..., rows, vocabulary].")
    check_targets(targets, ignore_index, logits, rows.shape[1], validate)
    return rows


def check_rows_apart(rows, logits) -> None:
    """Raise a ValueError where rows, `logits` as a matrix, share memory: one would overwrite another's logits."""
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"logits has strides {logits.stride()}, so that its rows share memory; the gradient cannot be written over "
            "them. Call logits.contiguous() first."
        )


def check_targets(targets, ignore_index, rows, vocabulary: int, validate: bool) -> None:
    """Raise a ValueError unless there is a target for each row of `rows`, [..., rows, anything].

    With `validate` they are read from the device: each must be in the vocabulary, or ignore_index.
    """
    dimensions = "[" + ", ".join(["..."] * (rows.dim() - 2) + ["rows"]) + "]"
    check_indices("targets", targets, dimensions, rows.shape[:-1], rows.device)
    if not targets.is_contiguous():
        raise ValueError(f"targets has strides {targets.stride()}; it must be contiguous. Call targets.contiguous().")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index is {ignore_index!r}; it must be an integer.")
    if validate:
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
        if outside.any():
            place = tuple(outside.nonzero()[0].tolist())
            raise ValueError(
                f"targets[{', '.join(map(str, place))}] is {targets[place].item()}; allowed are 0 to "
                f"{vocabulary - 1}, and {ignore_index} for a row that does not count."
            )


def check_loss_gradient(loss_gradient, targets) -> torch.Tensor:
    """It as a vector, of which one stride leads from row to row."""
    check_tensor("loss_gradient", loss_gradient, (torch.float32,))
    check_alike("loss_gradient", loss_gradient, "the losses", targets.new_empty(targets.shape, dtype=torch.float32))
    return loss_gradient.reshape(-1)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: long rows of 16 and of 32 bits."""
    cases = []
    for kernel in (cross_entropy_kernel, cross_entropy_backward_kernel, cross_entropy_in_place_kernel):
        for kind in ("fp16", "fp32"):
            tensors = {"logits_pointer": f"*{kind}", "targets_pointer": "*i64"}
            if "gradient_pointer" in kernel.arg_names:
                tensors["gradient_pointer"] = f"*{kind}"
            signature = signature_of(kernel, "fp32", **tensors)
            divisible = [name for name in signature if name != "ignore_index"]
            cases.append(CompileCase(kernel, signature, {"LANES": LANES, "GROUP": GROUP}, num_warps=NUM_WARPS,
                                     divisible=divisible, label=kind))  # fmt: skip
    return cases
