"""Which of the course's attention kernels runs: the fastest that can take these inputs on this machine.

    choose(query, key, value)                      # says which kernel computes the output, and why
    choose_backward(query, key, value)             # the same for the gradients
    forward(...), backward(...)                    # run it; `operator.attention` joins them for autograd
    portable(...)                                  # runs the best one that is no Gluon: pointers, TMA, or warps split

The portable kernel takes everything that attention takes. The one for Hopper asks for more (see `hopper.limits`) and is
faster, but for narrow windows of small heads. The choice changes the time and the rounding, and one thing more: with
the portable kernel a NaN or an infinity in a value that a mask hides stays hidden; with the other it can reach queries
of the same tile.
"""

from course_lib.hardware.kept import kept
from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.flash_tma import flash_attention_tma, tma_takes
from course_lib.kernels.attention.tiles import LARGE_ARCHITECTURES
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.choice import Choice
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.hopper.backward_limits import backward_refusal
from course_lib.kernels.hopper.flash_specialized import flash_attention_specialized, specialization_pays
from course_lib.kernels.hopper.limits import hopper_refusal

# H200, 8 and 32 heads, 1,024 and 16,384 tokens: portable is 4 to 30 % faster up to 256 keys at head dimension 64, equal
# or slower at 512, and slower at 128.
NARROW_WINDOW, NARROW_HEAD_DIM = 256, 64


def choose(query, key, value, *, causal=False, window=None, scale=None, sink=None) -> Choice:
    """Which kernel `forward` runs for these arguments, "hopper" or "portable", and why. Runs nothing.

    Raises a ValueError, of `check_attention_inputs`, where no kernel takes them.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale, sink=sink)
    refusal = hopper_refusal(query, key, value)
    if refusal is not None:
        return Choice("portable", refusal.reason)
    if causal and window is not None and window < NARROW_WINDOW and query.shape[3] <= NARROW_HEAD_DIM:
        keys = f"a causal window of fewer than {NARROW_WINDOW} keys at head dimension {query.shape[3]}"
        return Choice("portable", f"for {keys} it is faster.")
    return Choice("hopper", "the GPU is a Hopper, and its copy engine and matrix units take these inputs.")


def choose_backward(query, key, value, *, causal=False, window=None, scale=None) -> Choice:
    """Which kernels `backward` runs for these arguments, and why. Runs nothing.

    Raises a ValueError, of `check_attention_inputs`, where no kernel takes them.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale)
    refusal = backward_refusal(query, key, value, window=window)
    if refusal is None:
        return Choice("hopper", "the GPU is a Hopper, and its copy engine and matrix units take these inputs.")
    return Choice("portable", refusal.reason)


@kept
def forward(query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False):
    """What `operator.attention` returns, by the kernel that `choose` names; autograd sees nothing of it."""
    options = {"causal": causal, "window": window, "scale": scale, "sink": sink}
    if choose(query, key, value, **options).kernel == "portable":
        return portable(query, key, value, return_lse=return_lse, **options)
    # Only here, where it is known to work: Gluon needs a Triton that has it.
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    return flash_attention_hopper(query, key, value, return_lse=return_lse, **options)


def portable(query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False, tiles=None):
    """`flash_attention`, its arguments and results, by the fastest of the kernels in plain Triton.

    The inputs are taken to have passed `check_attention_inputs`.
    """
    more = causal or window is not None or sink is not None or return_lse or tiles is not None
    if architecture_of(query.device) not in LARGE_ARCHITECTURES or not tma_takes(query, key, value):
        run = flash_attention
    elif more or not specialization_pays(query, key):
        run = flash_attention_tma
    else:
        return flash_attention_specialized(query, key, value, scale=scale)
    options = {"causal": causal, "window": window, "scale": scale, "sink": sink}
    return run(query, key, value, return_lse=return_lse, tiles=tiles, **options)


def backward(
    query, key, value, output, log_sum_exp, output_gradient,
    *, causal=False, window=None, scale=None, log_sum_exp_gradient=None,
):  # fmt: skip
    """(dQ, dK, dV) by the kernels that `choose_backward` names; arguments as for `flash_attention_backward`."""
    saved = query, key, value, output, log_sum_exp, output_gradient
    options = {"causal": causal, "scale": scale, "log_sum_exp_gradient": log_sum_exp_gradient}
    if choose_backward(query, key, value, causal=causal, window=window, scale=scale).kernel == "portable":
        return flash_attention_backward(*saved, window=window, **options)
    from course_lib.kernels.hopper.backward import flash_attention_backward_hopper

    return flash_attention_backward_hopper(*saved, **options)
