"""The meter itself: opens the interpreter, has every access booked, and closes it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import self_test, summary, triton_internals
from .accounts import Accounts, Listener
from .allocations import Allocations
from .memory import MemoryShim
from .order import ASCENDING, numbering
from .results import Launch, MeterUnavailable, TrafficReport
from .tensors import View
from .undefined import UndefinedLanes


class TrafficMeter:
    """Counts the bytes of every kernel launched inside the ``with`` block, per tensor.

    Tensors are named after the kernel's parameter, or by you: ``TrafficMeter(x=x)`` or ``meter.watch(out=out)``, which
    also works after the kernels have run. Views of a named tensor count as that tensor.

    ``count_sectors=True`` also adds up, for every load, the 32-byte sectors that it touches: the traffic that a GPU
    cannot avoid when neighbouring lanes do not read neighbouring bytes. It costs a sort per load.

    ``undefined_lanes`` holds a number for each float dtype, as bits (``undefined_lanes.float32``), for the lanes that a
    load with a mask and no ``other=`` leaves undefined. By itself the interpreter gives 0 there, which a GPU need not.

    ``order`` is that in which the programs of a launch run: "ascending", "descending", or a number that they are
    shuffled by. A GPU keeps no order, so what changes with it is a race.

    ``listener`` is told of every launch and every access as it happens.

    Raises :class:`MeterUnavailable` on entry when Triton does not interpret, when another meter is already counting,
    or when this Triton's inside is not the one known here.
    """

    _active: TrafficMeter | None = None

    def __init__(
        self,
        *,
        count_sectors: bool = False,
        undefined_lanes: object = None,
        order: str | int = ASCENDING,
        listener: Listener | None = None,
        **tensors: torch.Tensor,
    ):
        self._named: dict[str, View] = {}
        self._launches: list[Launch] = []
        self._allocations = Allocations()
        self._accounts = Accounts(count_sectors, self._other_views, triton_internals.running_program, listener)
        self._listener = listener
        self._undefined = None if undefined_lanes is None else UndefinedLanes(undefined_lanes, self._accounts)
        self._order = numbering(order)
        self.watch(**tensors)

    def watch(self, **tensors: torch.Tensor) -> TrafficMeter:
        """Gives names to tensors; before, during or after the launches. Raises TypeError for what is no tensor."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"TrafficMeter was given {name}={type(tensor).__name__}; pass a torch.Tensor")
            self._named[name] = View(tensor)
        return self

    def listen(self, listener: Listener | None) -> None:
        """Has another listener told of what happens from now on; None for no one."""
        self._listener = listener
        self._accounts.listen(listener)

    def __enter__(self) -> TrafficMeter:
        self_test.require_interpreter()
        if TrafficMeter._active is not None:
            raise MeterUnavailable(
                "Another TrafficMeter is already counting. Leave its `with` block first, or name "
                "all tensors in one meter."
            )
        self_test.prove(TrafficMeter)
        self._open()
        return self

    def _open(self) -> None:
        TrafficMeter._active = self
        self._stack = contextlib.ExitStack()
        enter = self._stack.enter_context
        try:
            enter(triton_internals.memory_behind(lambda memory: MemoryShim(memory, self._accounts)))
            if self._undefined is not None:
                enter(triton_internals.filled_loads(self._undefined.filling))
            if self._order is not None:
                enter(triton_internals.renumbered_programs(self._order))
            enter(triton_internals.tagged_pointers(self._accounts.tagged_address))
            enter(triton_internals.copied_arguments(self._allocations.pause, self._accounts.begin))
            enter(triton_internals.products_told(self._accounts.multiplied))
            enter(triton_internals.interpreted_launches(self._launched))
            enter(self._allocations)
        except BaseException:
            self._close()
            raise

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        try:
            self._stack.close()
        finally:
            TrafficMeter._active = None
            self._accounts.forget_arguments()

    def _launched(self, launch: Launch) -> None:
        self._launches.append(launch)
        if self._listener is not None:
            self._listener.launched(launch.kernel, launch.grid)

    def _other_views(self) -> tuple[Iterator[tuple[str, View]], Iterator[tuple[str, View]]]:
        allocated = ((f"allocation_{number}", View(tensor)) for number, tensor in self._allocations.alive())
        return iter(self._named.items()), allocated

    def report(self) -> TrafficReport:
        """What was counted so far."""
        undefined = () if self._undefined is None else self._undefined.seen
        return summary.report(self._accounts, self._named, self._launches, self._allocations.noted, undefined)
