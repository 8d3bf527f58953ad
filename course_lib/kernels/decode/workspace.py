"""Memory that the splits of a decode step need between them, and where it comes from.

    workspace = decode_workspace(batch=1, query_heads=32, head_dim=128, splits=33, device="cuda")
    decode_attention(..., output=output, workspace=workspace, validate=False)      # allocates nothing: fit for a graph

4 · splits · batch · query_heads · (head_dim + 1) bytes of partial results, and counters of programs that have arrived.
Counters are 0 before and after every step, so a workspace serves any number of steps, one after another.
"""

from typing import NamedTuple

import torch

from course_lib.kernels.common.arrivals import arrival_counters
from course_lib.kernels.decode.tiles import decode_plan


class DecodeWorkspace(NamedTuple):
    """Made by `decode_workspace`; for one step at a time."""

    partial_outputs: torch.Tensor  # float32 [splits, batch, query_heads, head_dim]
    partial_lses: torch.Tensor  # float32 [splits, batch, query_heads]
    arrivals: torch.Tensor  # int32 [batch * query_heads], all 0
    lse: torch.Tensor  # float32 [batch, query_heads], where the log-sum-exp goes when it is asked for

    @property
    def splits(self) -> int:
        return self.partial_lses.shape[0]


def decode_workspace(batch: int, query_heads: int, head_dim: int, splits: int, device="cuda") -> DecodeWorkspace:
    """A workspace for decode steps with these sizes and this number of splits."""
    return DecodeWorkspace(*partial_tensors(batch, query_heads, head_dim, splits, device),
                           torch.zeros(batch * query_heads, dtype=torch.int32, device=device),
                           torch.empty(batch, query_heads, dtype=torch.float32, device=device))  # fmt: skip


def partial_tensors(batch, query_heads, head_dim, splits, device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (splits, batch, query_heads)
    return (torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device))  # fmt: skip


def prepare_step(
    query, key_heads: int, longest: int, splits, return_lse: bool, output, workspace, make_plan=decode_plan
) -> tuple:
    """The plan of a step on query [batch, query_heads, head_dim], and its buffers: those given, or new ones.

    Returns a DecodePlan, the output, (partial_outputs, partial_lses, arrivals) and the lse; None where not needed.
    Raises a ValueError when a given workspace does not fit.
    """
    if splits is None and workspace is not None:
        splits = workspace_splits(workspace)
    plan = make_plan(query, key_heads, longest, splits)
    parts, lse = take_workspace(workspace, query, plan.splits, return_lse)
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    return plan, output, parts, lse


def take_workspace(workspace, query, splits: int, return_lse: bool) -> tuple:
    """(partial_outputs, partial_lses, arrivals), lse for a step on query [batch, query_heads, head_dim]; None where not
    needed. Allocates what `workspace` (a DecodeWorkspace, or None) does not give.

    Raises a ValueError when a given workspace does not fit.
    """
    batch, query_heads, head_dim = query.shape
    device = query.device
    if workspace is not None:
        check_workspace(workspace, query, splits)
        parts = tuple(workspace[:3]) if splits > 1 else (None, None, None)
        return parts, workspace.lse if return_lse else None
    parts = (None, None, None)
    if splits > 1:
        parts = (*partial_tensors(batch, query_heads, head_dim, splits, device),
                 arrival_counters(batch * query_heads, device))  # fmt: skip
    return parts, torch.empty(batch, query_heads, dtype=torch.float32, device=device) if return_lse else None


def workspace_splits(workspace) -> int:
    """The splits that a given workspace is for; a ValueError when it is no workspace."""
    if not isinstance(workspace, DecodeWorkspace):
        raise ValueError(f"workspace is a {type(workspace).__name__}; it must be what decode_workspace() returns.")
    return workspace.splits


def check_workspace(workspace, query, splits: int) -> None:
    workspace_splits(workspace)
    given, wanted = tuple(workspace.partial_outputs.shape), (splits, *query.shape)
    if given != wanted:
        raise ValueError(
            f"workspace is one for [splits, batch, query_heads, head_dim] = {list(given)}; this step needs "
            f"{list(wanted)}. Make it with decode_workspace(...), and pass splits={given[0]} if that is what you mean."
        )
    if workspace.partial_outputs.device != query.device:
        raise ValueError(f"workspace is on {workspace.partial_outputs.device}; query is on {query.device}.")
