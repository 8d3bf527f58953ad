"""What the Blackwell kernel computes, in plain PyTorch: attention whose references are allowed to lag behind."""

import torch

from course_lib.kernels.common.softmax import scale_in_log2


def lazy_attention_reference(query, key, value, *, causal=False, scale=None, threshold=8.0, block=128):
    """(output, log-sum-exp, rescaled), row by row as the kernel has it, but in float64.

    query [query_length, head_dim], key and value [key_length, head_dim]. Blocks of keys are taken from the last to the
    first. A row's reference is what is subtracted from its scores, which are in units of log 2: the largest score of
    the first block in which it sees a key, until a block has one that exceeds it by more than threshold. Then it is
    that score, and what was summed is multiplied by 2^(old - new). rescaled: how often each row was, [query_length].
    """
    query_length, head_dim = query.shape
    key_length = key.shape[0]
    query, key, value = query.double(), key.double(), value.double()
    last_keys = torch.full((query_length,), key_length - 1)  # that a row sees
    if causal:
        last_keys = torch.arange(query_length) + key_length - query_length
    reference = torch.full((query_length,), -torch.inf, dtype=torch.float64)
    total = torch.zeros(query_length, dtype=torch.float64)
    output = torch.zeros(query_length, head_dim, dtype=torch.float64)
    rescaled = torch.zeros(query_length, dtype=torch.int64)
    for first_key in reversed(range(0, key_length, block)):
        keys = torch.arange(first_key, min(first_key + block, key_length))
        scores = query @ key[keys].T * scale_in_log2(scale, head_dim)  # [query_length, block]
        scores = scores.masked_fill(keys > last_keys[:, None], -torch.inf)
        largest = scores.amax(1)
        grows = largest > reference + threshold
        factor = torch.where(grows & (reference > -torch.inf), torch.exp2(reference - largest), 1.0)
        reference = torch.where(grows, largest, reference)
        weights = torch.exp2(scores - torch.where(reference == -torch.inf, 0.0, reference)[:, None])
        total = total * factor + weights.sum(1)
        output = output * factor[:, None] + weights @ value[keys]
        rescaled += factor < 1
    total = torch.where(total == 0, 1.0, total)
    return output / total[:, None], (reference + torch.log2(total)) * torch.log(torch.tensor(2.0)).double(), rescaled
