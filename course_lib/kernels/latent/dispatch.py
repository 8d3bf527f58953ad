"""Latent decode by the fastest kernel that takes the inputs: on Hopper its own, elsewhere the portable one."""

from course_lib.kernels.latent.attention import latent_decode_attention, paged_latent_decode_attention
from course_lib.kernels.latent.hopper_limits import VALUE_DIM, latent_hopper_refusal


def latent_decode(query, cache, lengths, *, value_dim=VALUE_DIM, **options):
    """Attention of the last tokens of each sequence to its latent cache; as `latent_decode_attention` says it.

    On Hopper (compute capability 9.0), latents of 512 + 64 numbers of 16 bits, at addresses and strides that the copy
    engine can use, go to `latent_decode_hopper`.
    """
    if takes_hopper(query, cache, value_dim, paged=False):
        from course_lib.kernels.latent.hopper import latent_decode_hopper

        return latent_decode_hopper(query, cache, lengths, **options)
    return latent_decode_attention(query, cache, lengths, value_dim=value_dim, **options)


def paged_latent_decode(query, pages, block_tables, lengths, *, value_dim=VALUE_DIM, **options):
    """`latent_decode` for pages, as `paged_latent_decode_attention` says it; Hopper wants pages of 64 · n."""
    if takes_hopper(query, pages, value_dim, paged=True):
        from course_lib.kernels.latent.hopper import paged_latent_decode_hopper

        return paged_latent_decode_hopper(query, pages, block_tables, lengths, **options)
    return paged_latent_decode_attention(query, pages, block_tables, lengths, value_dim=value_dim, **options)


def takes_hopper(query, cache, value_dim, paged: bool) -> bool:
    """Whether the Hopper kernel takes the step; arguments that are no such tensors are the other kernel's to refuse."""
    if getattr(query, "ndim", 0) != 4 or getattr(cache, "ndim", 0) != 3:
        return False
    return latent_hopper_refusal(query, cache, value_dim=value_dim, paged=paged) is None
