"""All-reduce over the GPUs of one host, by the form that is fastest for so many bytes.

    all_reduce = AllReduce(ranks, most_bytes=1 << 20)       # on every rank, inside `run_on_ranks`
    total = all_reduce(x)                                   # the sum of all ranks' x, with the same bits on each
    all_reduce.method(x)                                    # "one-shot", "two-shot" or "library", and why

One-shot has one trip over the link, two-shot the fewest bytes; the library, NCCL or gloo, takes what neither does. The
first two can be captured in a CUDA graph: what a call must know of the calls before it lies in the GPUs' memory.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.hardware.ranks import Ranks
from course_lib.hardware.symmetric import SymmetricBuffer, no_common_memory
from course_lib.kernels.common.dependent import launch_options
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.parallel import add_rms_norm, one_shot, two_shot
from course_lib.kernels.parallel.add_rms_norm import sum_add_rms_norm_kernel
from course_lib.kernels.parallel.one_shot import one_shot_kernel
from course_lib.kernels.parallel.two_shot import two_shot_kernel

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ONE_SHOT_BYTES = {2: 1 << 19, 3: 1 << 18, 4: 1 << 18}  # at most, by ranks; more ranks: 128 KiB
TWO_SHOT_PROGRAMS = 128  # all at a time, as each waits for its like: no more than an H100's multiprocessors


class AllReduce:
    """The sum of a tensor over all ranks.

    Args:
        ranks: this process's place.
        most_bytes: of a tensor that is not left to the library. Memory of several times this size is taken.

    Attributes:
        refusal: why every call is the library's, or None.

    All ranks make it together, and call it in the same order with the same shapes.
    """

    def __init__(self, ranks: Ranks, most_bytes: int = 1 << 26):
        self.ranks, self.most_bytes = ranks, most_bytes
        self.refusal = no_common_memory(ranks)
        if ranks.device.type != "cuda" and not interpreting():
            self.refusal = "without a GPU the kernels run in Triton's interpreter alone (TRITON_INTERPRET=1)."
        if self.refusal is not None or ranks.size == 1:
            return
        self.one_shot_bytes = min(most_bytes, ONE_SHOT_BYTES.get(ranks.size, 1 << 17))
        block = one_shot.BLOCK.value
        self.capacity = triton.cdiv(self.one_shot_bytes // 4, block) * block  # words of an inbox
        self._inboxes = SymmetricBuffer(ranks, 2 * ranks.size * self.capacity * 8)
        self._one_shot_counts = torch.zeros(self.capacity // block, dtype=torch.int32, device=ranks.device)
        self.share_bytes = triton.cdiv(triton.cdiv(most_bytes, ranks.size), two_shot.BLOCK * 4) * two_shot.BLOCK * 4
        self.programs = TWO_SHOT_PROGRAMS if ranks.device.type == "cuda" else 2
        self._signals_offset = 2 * ranks.size * self.share_bytes
        self._shares = SymmetricBuffer(ranks, self._signals_offset + 2 * self.programs * ranks.size * 4)
        self._two_shot_counts = torch.zeros(self.programs, dtype=torch.int32, device=ranks.device)
        rows = add_rms_norm.MOST_ROWS
        self._rows = SymmetricBuffer(ranks, 2 * ranks.size * rows * add_rms_norm.ROW_WORDS * 8)
        self._rows_counts = torch.zeros(rows, dtype=torch.int32, device=ranks.device)

    def method(self, x: torch.Tensor) -> tuple[str, str]:
        """How x would be summed, and why in a sentence."""
        if self.refusal is not None:
            return "library", self.refusal
        if x.dtype not in TYPES:
            return "library", f"the kernels add up {', '.join(map(str, TYPES))}, and this is {x.dtype}."
        if x.nbytes <= self.one_shot_bytes and x.nbytes % 4 == 0:
            return "one-shot", f"{x.nbytes:,} bytes are few: one trip over the link counts for more than their number."
        if x.nbytes <= self.most_bytes:
            return "two-shot", f"{x.nbytes:,} bytes are many: each rank adds up its share alone."
        return "library", f"{x.nbytes:,} bytes are more than the {self.most_bytes:,} that room was made for."

    def __call__(self, x: torch.Tensor, method: str | None = None, *, validate: bool = False) -> torch.Tensor:
        """The sum of x over the ranks, a new tensor of x's shape and dtype, the same bits on all of them.

        Args:
            x: of any shape, the same on all ranks; its numbers are added up in float32.
            method: "one-shot", "two-shot" or "library"; None takes what `method` says.
            validate: compare the shapes and dtypes of all ranks first, which takes a millisecond and cannot be
                captured. Without it ranks that disagree wait for ever, or add up what does not belong together.

        Raises:
            ValueError: on all ranks where they disagree; a method that does not take x.
        """
        if self.ranks.size == 1:
            return x.clone()
        if validate:
            self.ranks.agree(shape=tuple(x.shape), dtype=x.dtype, method=method)
        chosen, why = self.method(x)
        if method is not None and method != chosen:
            chosen = self._given(x, method, why)
        if chosen == "library":
            return self.ranks.sum(x)
        x = x.contiguous()
        if x.storage_offset() * x.itemsize % 4:  # the kernel reads 32 bits at a time
            x = x.clone()
        output = torch.empty_like(x)
        (self._one_shot if chosen == "one-shot" else self._two_shot)(x, output)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, stream: torch.Tensor, gain: torch.Tensor, epsilon: float, *, dependent: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(RMSNorm of the sum, the sum) of stream and all ranks' x, in one kernel where the rows are few.

        x, stream: [rows, width], contiguous; stream is the same on all ranks. gain: [width], the norm's weight; all of
        one dtype. dependent: start while the kernel before still runs, as `kernels.common.dependent` has it.
        """
        words = x.shape[1] * x.dtype.itemsize // 4
        whole = x.dtype in TYPES and x.shape[1] * x.dtype.itemsize % 4 == 0
        if self.refusal or self.ranks.size == 1 or not whole or words > add_rms_norm.ROW_WORDS or (
            len(x) > add_rms_norm.MOST_ROWS
        ):  # fmt: skip
            return add_rms_norm_forward(self(x), stream, gain, epsilon, dependent=dependent)
        normalised, summed = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(words)
        tensors = (tensor.view(-1).view(torch.int32) for tensor in (x, stream, gain, normalised, summed))
        sum_add_rms_norm_kernel[(len(x),)](
            *tensors, self._rows.addresses, self._rows_counts, self.ranks.rank, words, x.shape[1], epsilon,
            TYPE=TYPES[x.dtype], RANKS=self.ranks.size, BLOCK=block, ROWS=add_rms_norm.MOST_ROWS,
            STRIDE=add_rms_norm.ROW_WORDS, num_warps=add_rms_norm.warps_of(block),
            **launch_options(dependent, x.device),
        )  # fmt: skip
        return normalised, summed

    def _given(self, x: torch.Tensor, method: str, why: str) -> str:
        takes = {
            "one-shot": x.nbytes <= self.capacity * 4 and x.nbytes % 4 == 0 and x.dtype in TYPES,
            "two-shot": x.nbytes <= self.most_bytes and x.dtype in TYPES,
            "library": True,
        } if self.refusal is None else {"library": True}  # fmt: skip
        if not takes.get(method):
            raise ValueError(
                f"method {method!r} does not take this tensor of {x.nbytes:,} bytes of {x.dtype}; "
                f"{', '.join(name for name, can in takes.items() if can)} can. {why}"
            )
        return method

    def _one_shot(self, x: torch.Tensor, output: torch.Tensor) -> None:
        words = x.nbytes // 4
        one_shot_kernel[(triton.cdiv(words, one_shot.BLOCK.value),)](
            x.view(-1).view(torch.int32), output.view(-1).view(torch.int32), self._inboxes.addresses,
            self._one_shot_counts, self.ranks.rank, words, self.capacity,
            TYPE=TYPES[x.dtype], RANKS=self.ranks.size, BLOCK=one_shot.BLOCK, num_warps=one_shot.NUM_WARPS,
        )  # fmt: skip

    def _two_shot(self, x: torch.Tensor, output: torch.Tensor) -> None:
        size = self.ranks.size
        share = triton.cdiv(triton.cdiv(x.numel(), size), two_shot.BLOCK) * two_shot.BLOCK
        two_shot_kernel[(self.programs,)](
            x, output, self._shares.addresses, self._two_shot_counts, self.ranks.rank, x.numel(), share,
            size * self.share_bytes, self._signals_offset,
            RANKS=size, LANES=triton.next_power_of_2(size), BLOCK=two_shot.BLOCK, num_warps=two_shot.NUM_WARPS,
        )  # fmt: skip
