"""What attention over a sequence on several ranks asks of its arguments, and how all ranks learn of a refusal."""

from course_lib.kernels.common.attention_checks import check_attention_inputs


def check_on_all_ranks(ranks, query, key, value, refuse, *, causal, scale, validate: bool) -> None:
    """Raise a ValueError where this rank's arguments cannot be taken; with `validate`, where any rank's cannot.

    refuse: called without arguments after the checks of `check_attention_inputs`; raises a ValueError for what else
        stands against them.
    validate: all ranks tell one another their shapes, dtypes, options and refusals, and all raise. A rank that raised
        alone would leave the others waiting for its keys.
    """
    refusal = None
    try:
        check_attention_inputs(query, key, value, scale=scale)
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"query has length {query.shape[2]} and key {key.shape[2]}; a rank holds query, key and value of the "
                "same places."
            )
        refuse()
    except ValueError as error:
        refusal = str(error)
    if validate:
        inputs = {"query": query, "key": key, "value": value}
        shapes = {f"{name}'s shape": tuple(getattr(tensor, "shape", ())) for name, tensor in inputs.items()}
        others = {f"{name}'s {what}": getattr(tensor, what, None)
                  for what in ("dtype", "requires_grad") for name, tensor in inputs.items()}  # fmt: skip
        ranks.agree(**shapes, **others, causal=causal, scale=scale, refusal=refusal)
    if refusal is not None:
        raise ValueError(refusal)
