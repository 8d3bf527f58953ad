"""What the Blackwell kernel of attention asks of the machine and its inputs, each refusal in a sentence; no Gluon."""

from course_lib.kernels.gluon.limits import BLACKWELL, Refusal, machine_refusal
from course_lib.kernels.hopper.limits import input_refusal

MOST_HEAD_DIM = 128  # two outputs of more would leave tensor memory no columns for two tiles of scores


def blackwell_refusal(query, key, value) -> Refusal | None:
    """What stands against the Blackwell kernel for these inputs; None if nothing.

    The inputs, of shape [batch, heads, length, head_dim], are taken to have passed `check_attention_inputs`.
    """
    refusal = machine_refusal(query.device, BLACKWELL) or input_refusal(query, key, value, "Blackwell")
    if refusal is None and query.shape[3] > MOST_HEAD_DIM:
        return Refusal(
            ValueError, f"query has head dimension {query.shape[3]}; the Blackwell kernel takes up to {MOST_HEAD_DIM}."
        )
    return refusal
