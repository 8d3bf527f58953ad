"""Attention over block lists: `block_sparse_attention`.

    lists = block_lists(lambda batch, head, query, key: key <= query, 4096, 4096)
    output = block_sparse_attention(query, key, value, lists)

Lists are built once and serve every layer and step of their lengths: see `block_lists` for what they are and take.
"""

from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.sparse.block_lists import BlockLists, check_lists
from course_lib.kernels.sparse.forward import forward


def block_sparse_attention(query, key, value, lists: BlockLists, *, scale=None, return_lse=False):
    """Exact softmax attention of each query to the keys that the lists show it, at the cost of the tiles on them.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256.
            Any strides, with a contiguous last dimension.
        key, value: [batch, key_heads, key_length, head_dim], of query's dtype and device. query_heads is a multiple of
            key_heads; query head h reads key head h // (query_heads // key_heads).
        lists: what `block_lists` or `given_block_lists` made for these lengths, on this device.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        return_lse: also return the log-sum-exp of each row of scaled scores, natural logarithm, float32
            [batch, query_heads, query_length].

    Returns the output, contiguous, of query's shape and dtype, or (output, log-sum-exp). A query that sees no key gets
    zeros and minus infinity. A tile on no list is not read, so a NaN in it reaches nothing; one in a value that the
    mask of a partial tile hides can reach the queries of that tile.

    Raises a ValueError that names the argument when shapes, dtypes, devices or lists don't fit.
    """
    check_attention_inputs(query, key, value, scale=scale)
    check_lists(lists, query, key)
    output, log_sum_exp = forward(query, key, value, lists, scale=scale)
    return (output, log_sum_exp) if return_lse else output
