"""Wrong answers to exercise 7.3, and unusual right ones."""

from tests.submissions.edits import changed

SPLIT = "heads = weight.unflatten(0, (new_key_heads, group, head_dim))"


POOLED = "return heads.mean(dim=1).flatten(0, 1)"


WRONG = {
    "heads_interleaved": changed(
        "7.3", (SPLIT, "heads = weight.unflatten(0, (group, new_key_heads, head_dim))"), ("mean(dim=1)", "mean(dim=0)")
    ),
    "rows_averaged": changed(
        "7.3", (SPLIT, ""), (POOLED, "return weight.unflatten(0, (new_key_heads * head_dim, group)).mean(dim=1)")
    ),
    "rows_averaged__split_as_head_dim_by_heads": changed(
        "7.3",
        (SPLIT, "heads = weight.unflatten(0, (head_dim, new_key_heads, group))"),
        ("heads.mean(dim=1)", "heads.mean(dim=2)"),
    ),
    "summed": changed("7.3", ("heads.mean(dim=1)", "heads.sum(dim=1)")),
    "bias_gets_a_dimension": changed(
        "7.3", (SPLIT, "heads = weight.reshape(new_key_heads, group, head_dim, -1)")
    ),
    "summed__and_bias_gets_a_dimension": changed(
        "7.3", (SPLIT, "heads = weight.reshape(new_key_heads, group, head_dim, -1)"), ("heads.mean", "heads.sum")
    ),
    "first_of_group": changed("7.3", ("heads.mean(dim=1)", "heads[:, 0]")),
    "first_heads_kept": changed("7.3", (POOLED, "return weight[: new_key_heads * head_dim].clone()")),
    "everything_averaged": changed(
        "7.3", (POOLED, "return torch.cat([weight.unflatten(0, (key_heads, head_dim)).mean(dim=0)] * new_key_heads)")
    ),
    "pooled_then_repeated": changed(
        "7.3", (POOLED, "return heads.mean(dim=1).repeat_interleave(group, dim=0).flatten(0, 1)")
    ),
    "added_up_in_16_bits": changed("7.3", ("heads.mean(dim=1)", "(heads.sum(dim=1) / group)")),
    "added_up_in_16_bits__one_by_one": changed(
        "7.3", ("heads.mean(dim=1)", "(sum(heads[:, member] for member in range(group)) / group)")
    ),
    "computed_in_16_bits": changed("7.3", ("heads.mean(dim=1)", "heads.half().double().mean(dim=1).to(weight.dtype)")),
    "divided_by_the_new_heads": changed("7.3", ("heads.mean(dim=1)", "(heads.sum(dim=1) / new_key_heads)")),
    "group_and_new_heads_exchanged": changed(
        "7.3", (SPLIT, "heads = weight.unflatten(0, (group, new_key_heads, head_dim))")
    ),
    "not_the_whole_group": changed("7.3", ("heads.mean(dim=1)", "heads[:, : max(group - 1, 1)].mean(dim=1)")),
    "median_taken": changed("7.3", ("heads.mean(dim=1)", "heads.median(dim=1).values")),
}


POOL_BY_LOOP = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    heads = weight.chunk(key_heads, dim=0)
    group = key_heads // new_key_heads
    new = []
    for first in range(0, key_heads, group):
        new.append(torch.stack(heads[first:first + group]).mean(0))
    return torch.cat(new)
"""


POOL_BY_MATRIX = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    group = key_heads // new_key_heads
    mix = torch.zeros(new_key_heads, key_heads)
    for head in range(key_heads):
        mix[head // group, head] = 1 / group
    flat = weight.float().reshape(key_heads, -1)
    return (mix @ flat).reshape(new_key_heads * (weight.shape[0] // key_heads), *weight.shape[1:]).to(weight.dtype)
"""


POOL_IN_PLACE_OF_A_COPY = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    head_dim, group = weight.shape[0] // key_heads, key_heads // new_key_heads
    out = torch.zeros(new_key_heads * head_dim, *weight.shape[1:], dtype=torch.float64)
    for head in range(key_heads):
        new = head // group
        out[new * head_dim:(new + 1) * head_dim] += weight[head * head_dim:(head + 1) * head_dim]
    return (out / group).to(weight.dtype)
"""


POOL_IN_HALVES = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    heads = weight.reshape(new_key_heads, key_heads // new_key_heads, weight.shape[0] // key_heads, -1)
    pooled = sum(heads[:, i] / heads.shape[1] for i in range(heads.shape[1]))
    return pooled.reshape(-1, *weight.shape[1:])
"""


UNUSUAL = {
        "float64 by way of float32": changed(
            "7.3", (POOLED, "return heads.float().mean(dim=1).flatten(0, 1).to(weight.dtype)")
        ),
        "chunks stacked": POOL_BY_LOOP,
        "a product with a matrix": POOL_BY_MATRIX,
        "added up in float64": POOL_IN_PLACE_OF_A_COPY,
        "divided first": POOL_IN_HALVES,
    }
