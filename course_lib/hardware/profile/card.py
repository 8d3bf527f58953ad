"""The card: facts from the compiler and the meter, ncu's own figures beside them, and one sentence."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

from course_lib.hardware.compiler.compiled import CompiledKernel
from course_lib.hardware.profile.occupancy import Occupancy
from course_lib.hardware.profile.seen import KernelSeen
from course_lib.hardware.units import format_bytes, format_seconds


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of the function: what the meter saw, and what the compiler made of it, or why it did not."""

    seen: KernelSeen
    view: CompiledKernel | str
    occupancy: Occupancy | None

    @property
    def name(self) -> str:
        return self.seen.name

    def rows(self) -> list[tuple[str, str]]:
        """(what, value), in the order of the card."""
        grid = " × ".join(str(extent) for extent in self.seen.grid)
        rows = [("launches", f"{self.seen.launches} of {grid} programs")]
        if self.seen.requested_bytes:
            times = self.seen.sector_bytes / self.seen.requested_bytes
            rows.append(("sectors", f"{format_bytes(self.seen.sector_bytes)}, {times:.2f} times what is asked for"))
        if self.seen.atomic_lanes:
            rows.append(("atomic updates", f"{self.seen.atomic_lanes:,}"))
        if isinstance(self.view, CompiledKernel):
            what = (
                "registers per thread", "spilled per thread", "shared memory per program", "matrix instructions",
                "loads from global memory", "asynchronous copies",
            )  # fmt: skip
            known = dict(self.view.rows())
            rows += [(name, known[name]) for name in what]
        else:
            rows.append(("compiler", str(self.view)))
        if self.occupancy is not None:
            held = f"{self.occupancy.warps} of {self.occupancy.most_warps} warps ({self.occupancy.share:.0%})"
            rows.append(("occupancy", f"{held}, limited by {self.occupancy.limited_by}"))
        return rows


@dataclass(frozen=True)
class Profile:
    """What `profile` found. `look_at` is the sentence; the other fields are what it was made from."""

    function: str
    target: str  # "H100 (sm_90)"
    multiprocessors: int | None  # of the target's datasheet; None where it states none
    kernels: tuple[KernelFacts, ...]
    moved_bytes: int  # sectors that all accesses touch, as if no cache held anything
    least_bytes: int  # each byte once, or what was given
    least_was_given: bool
    flops: float | None
    roof: str  # "memory" or "compute": which the least work would reach first on this target
    roof_seconds: float | None  # the least time under that roof; None where no datasheet is known
    seconds: float | None = None  # measured, on a GPU
    times_read: Mapping[str, float] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    stopped: str = ""
    counters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # ncu's: kernel -> what -> value
    counters_missing: str = ""  # why there are none, and how to get them
    look_at: str = ""

    @property
    def roof_share(self) -> float | None:
        """Measured share of the roof; None without a GPU."""
        if self.seconds is None or self.roof_seconds is None:
            return None
        return self.roof_seconds / self.seconds

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) of the whole function."""
        least = "given" if self.least_was_given else "every byte that is touched, once"
        rows = [("bytes, at least", f"{format_bytes(self.least_bytes)} ({least})")]
        if self.least_bytes:
            times = self.moved_bytes / self.least_bytes
            rows.append(("bytes, without caches", f"{format_bytes(self.moved_bytes)}, {times:.2f} times the least"))
        if self.flops is not None:
            intensity = f", {self.flops / self.least_bytes:.3g} a byte" if self.least_bytes else ""
            rows.append(("FLOPs", f"{self.flops:.3g}{intensity}"))
        if self.roof_seconds is not None:
            rows.append((f"{self.roof} roof", f"{format_seconds(self.roof_seconds)} at the datasheet's rate"))
        if self.seconds is not None and self.roof_share is not None:
            rows.append(("measured", f"{format_seconds(self.seconds)}, {self.roof_share:.0%} of the {self.roof} roof"))
        return rows

    def _sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        sections = [("", self.rows())] if self.kernels else []
        sections += [(kernel.name, kernel.rows()) for kernel in self.kernels]
        sections += [(f"ncu: {kernel}", list(values.items())) for kernel, values in self.counters.items()]
        return sections

    def __str__(self) -> str:
        lines = [f"Profile of {self.function} for {self.target}", f"  Look at: {self.look_at}"]
        for title, rows in self._sections():
            lines += [f"  {title}"] if title else []
            width = max(len(what) for what, _ in rows)
            lines += [f"    {what.ljust(width)}  {value}" for what, value in rows]
        if self.counters_missing:
            lines.append(f"  No counters of ncu: {self.counters_missing}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # As the verdict's card: the border carries the colour, the text keeps the theme's own.
        colour = "#2f6fb3"
        parts = [
            f'<div style="font-weight:600">Profile of {html.escape(self.function)} '
            f'<span style="color:{colour}">{html.escape(self.target)}</span></div>',
            f'<div style="margin:.35em 0;padding:.4em .6em;border-left:3px solid {colour}"><b>Look at.</b> '
            f"{html.escape(self.look_at)}</div>",
        ]
        for title, rows in self._sections():
            if title:
                parts.append(f'<div style="margin-top:.5em"><code>{html.escape(title)}</code></div>')
            cells = "".join(
                f'<tr><th style="text-align:left;font-weight:400;opacity:.7">{html.escape(what)}</th>'
                f'<td style="text-align:left">{html.escape(value)}</td></tr>'
                for what, value in rows
            )
            parts.append(f'<table style="margin:.2em 0">{cells}</table>')
        if self.counters_missing:
            parts.append(f'<div style="opacity:.7">No counters of ncu: {html.escape(self.counters_missing)}</div>')
        return (
            f'<div style="border:1px solid {colour};border-left:6px solid {colour};border-radius:6px;padding:.6em .9em;'
            f'max-width:56em;line-height:1.4">{"".join(parts)}</div>'
        )
