"""The last linear layer and cross-entropy, by chunks of tokens: no [tokens, vocabulary] tensor ever lives.

    logits = hidden · weightᵀ                          [tokens, vocabulary], one chunk of rows at a time
    loss   = cross-entropy of each row                 as in `cross_entropy`
    hidden_gradient = logits_gradient · weight,    weight_gradient = Σ over chunks of logits_gradientᵀ · hidden

Llama 3's vocabulary has 128,256 tokens. The logits of 65,536 tokens are 16.8 GB in 16 bits, and their gradient as much;
those of a chunk of 8192 rows are 2.1 GB. Its gradient is written over it (`cross_entropy_forward_backward_`), used in
two products, and forgotten.

                                   matrix products    largest tensor beside the arguments
    layer, then cross-entropy             3           tokens · vocabulary, twice
    by chunks, gradient known             3           chunk · vocabulary, or vocabulary · hidden: the weight's gradient
    by chunks, as an operator             4           the same; the backward pass computes the logits again

So this saves memory, not time: each product is 2 · tokens · hidden · vocabulary FLOPs, and the sum of the weight's
gradient is read and written for every chunk but the first, which writes it. That is 8 bytes of traffic an element of
the weight for each chunk, if the product adds to it, and 12 if it is added after: at 250 FLOP/byte, 333 or 500 / rows
of the products' time. On an H100, 8192 tokens of 4096 numbers took 117 ms in chunks of 261 rows, whose logits are as
large as the hidden states, and added after; 48.6 ms in chunks of 2048, and 43.1 ms added inside. The layer and then the
loss took 42.6. On an H200, in another run, the same tokens took 40.4 ms in chunks of 4096 and 39.0 in one;
torch.compile took 40.1. So a chunk is as large as the weight's gradient allows, beside which it lives. The operator
needs the fourth product because its backward pass learns what each loss counts for only after the forward pass has
forgotten the logits. Where that is known beforehand, 1 / (targets that count) for a mean,
`linear_cross_entropy_forward_backward` does without it.

The weight's gradient is a sum over chunks. Where there are several it is kept in float32, so that late chunks are not
rounded away; on a CPU a chunk's own product is rounded to 16 bits once.

Sources: Hsu et al., Liger Kernel, arXiv 2410.10989, section 3 (chunks). Wijmans et al., Cut your losses, arXiv
2411.09009, which keeps not even a chunk.
"""

import torch

from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_tensor
from course_lib.kernels.fused.cross_entropy import (
    IGNORE_INDEX,
    check_loss_gradient,
    check_targets,
    cross_entropy_backward_reference,
    cross_entropy_forward,
    cross_entropy_forward_backward_,
    cross_entropy_reference,
)

LEAST_ROWS = 2048  # of a chunk: with fewer its products wait for the weight, or for the weight's gradient


def linear_cross_entropy_reference(hidden, weight, targets, ignore_index=IGNORE_INDEX):
    """The plain PyTorch meaning: losses [tokens] of hidden [tokens, hidden] and weight [vocabulary, hidden]."""
    return cross_entropy_reference(hidden @ weight.t(), targets, ignore_index)


def linear_cross_entropy_backward_reference(hidden, weight, targets, loss_gradient, ignore_index=IGNORE_INDEX):
    """The plain PyTorch meaning of the gradients of hidden and weight."""
    logits = hidden @ weight.t()
    gradient = cross_entropy_backward_reference(logits, targets, loss_gradient, ignore_index)
    return gradient @ weight, gradient.t() @ hidden


def linear_cross_entropy_forward(
    hidden, weight, targets, ignore_index=IGNORE_INDEX, validate=True, chunk_rows=None
) -> torch.Tensor:
    """The loss of each token, float32 [...], without a gradient.

    `linear_cross_entropy_operators.linear_cross_entropy` has one.

    Args:
        hidden: [..., hidden], float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions
            that flatten without a copy.
        weight: [vocabulary, hidden], of hidden's dtype, of any strides.
        targets: int32 or int64 [...], contiguous: 0 to vocabulary - 1, or ignore_index.
        ignore_index, validate: as for `cross_entropy_forward`.
        chunk_rows: tokens whose logits live at a time; None for as many as make logits of hidden's size, and at least
            LEAST_ROWS.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    rows, flat_targets, chunk_rows = check_arguments(hidden, weight, targets, ignore_index, validate, chunk_rows)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    parts = zip(rows.split(chunk_rows), flat_targets.split(chunk_rows), losses.view(-1).split(chunk_rows))
    for chunk, chunk_targets, chunk_losses in parts:
        chunk_losses.copy_(cross_entropy_forward(chunk @ weight.t(), chunk_targets, ignore_index, validate=False)[0])
    return losses


def linear_cross_entropy_forward_backward(
    hidden, weight, targets, loss_gradient, ignore_index=IGNORE_INDEX, validate=True, chunk_rows=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, hidden gradient, weight gradient), with three matrix products.

    Args:
        hidden, weight, targets, ignore_index, validate: as for `linear_cross_entropy_forward`.
        loss_gradient: float32, of targets' shape and of any strides: what each loss counts for.
        chunk_rows: as there, but None stands for as many as make logits of the size of the weight's gradient in
            float32, and at least LEAST_ROWS.

    Returns losses float32 [...], and contiguous tensors of the shapes and dtypes of hidden and weight. An ignored token
    has no loss, a hidden gradient of zeros, and no part in the weight's.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    given_rows = chunk_rows
    rows, flat_targets, chunk_rows = check_arguments(hidden, weight, targets, ignore_index, validate, chunk_rows)
    if given_rows is None:
        chunk_rows = max(LEAST_ROWS, 4 * rows.shape[1] // hidden.element_size())
    scales = check_loss_gradient(loss_gradient, targets)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    summed_in = torch.float32 if len(rows) > chunk_rows else weight.dtype
    weight_gradient = torch.empty(weight.shape, dtype=summed_in, device=hidden.device)
    tensors = rows, flat_targets, scales, losses.view(-1), hidden_gradient.view(rows.shape)
    chunks = zip(*(tensor.split(chunk_rows) for tensor in tensors))
    for number, (chunk, chunk_targets, chunk_scales, chunk_losses, chunk_gradient) in enumerate(chunks):
        logits = chunk @ weight.t()  # [at most chunk_rows, vocabulary]
        found = cross_entropy_forward_backward_(logits, chunk_targets, chunk_scales, ignore_index, validate=False)
        chunk_losses.copy_(found)
        torch.mm(logits, weight, out=chunk_gradient)  # of the logits, which now hold their gradient
        if number == 0:
            write_product_(weight_gradient, logits.t(), chunk)
        else:
            add_product_(weight_gradient, logits.t(), chunk)
        del logits  # or the next chunk's would live beside them
    return losses, hidden_gradient, weight_gradient.to(weight.dtype)


def write_product_(total, left, right) -> None:
    """total = left · right, float32 or of their dtype."""
    if left.dtype == total.dtype:
        torch.mm(left, right, out=total)
    elif total.is_cuda:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        total.copy_(left @ right)


def add_product_(total, left, right) -> None:
    """Add left · right to total, float32. On a CPU a product of 16-bit factors is rounded to 16 bits before."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # inside the product: 8 bytes of traffic an element instead of 12
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def check_arguments(hidden, weight, targets, ignore_index, validate, chunk_rows):
    """hidden as rows, targets as a vector, and how many rows a chunk has, after what both functions ask."""
    check_tensor("hidden", hidden, FLOAT_DTYPES)
    rows = as_rows("hidden", hidden)
    check_tensor("weight", weight, (hidden.dtype,))
    if weight.dim() != 2 or weight.shape[1] != rows.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be [vocabulary, {rows.shape[1]}]: a row, as wide as "
            "hidden, for each token of the vocabulary."
        )
    if weight.device != hidden.device:
        raise ValueError(f"weight is on device {weight.device}; it must be on that of hidden, {hidden.device}.")
    if hidden.dim() < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be [..., tokens, hidden].")
    check_targets(targets, ignore_index, hidden, weight.shape[0], validate)
    if chunk_rows is None:
        chunk_rows = max(LEAST_ROWS, rows.numel() // weight.shape[0])
    elif isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows!r}; it must be None or a whole number of at least 1.")
    return rows, targets.view(-1), chunk_rows
