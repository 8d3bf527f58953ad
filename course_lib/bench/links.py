"""`python -m course_lib bench links`: exchanges between the GPUs of this machine, beside NCCL's.

Three parts, on 2 ranks and on 4 where there are so many GPUs; without multicast:

    links          bytes a second between neighbours, and a meeting of all ranks
    all-reduce     bfloat16, 4 KiB to 64 MiB: one-shot, two-shot, NCCL, and the model of exercise 20.1 with these links;
                   what `AllReduce` takes by itself; in µs, 20 in a CUDA graph
    products       rows scattered behind a product, and gathered before one, overlapped and as NCCL after cuBLAS

Each form is compared with NCCL's result first. Times are those of the slowest rank, the median of rounds in turns.
"""

import torch
import torch.distributed as distributed

from course_lib.bench._record import clocks, write_record
from course_lib.hardware.links import measured_links, times_in_turns
from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.kernels.parallel.all_reduce import AllReduce
from course_lib.kernels.parallel.overlap import Exchange, gathered_product, product_scattered

SIZES = [1 << power for power in range(12, 27, 2)] + [1 << 17, 1 << 19, 1 << 21]
ROWS = (256, 1024, 4096, 8192, 16384)
WIDTH, HIDDEN = 4096, 14336  # Llama-3-8B's


def all_reduces(ranks: Ranks) -> dict[int, dict]:
    """{bytes: {form: seconds, or why not}}."""
    all_reduce, table = AllReduce(ranks, most_bytes=1 << 26), {}
    for nbytes in sorted(SIZES):
        x = torch.randn(nbytes // 2, device=ranks.device, dtype=torch.bfloat16)
        exact = ranks.sum(x.float())
        forms = {"one-shot": lambda x=x: all_reduce(x, "one-shot"), "two-shot": lambda x=x: all_reduce(x, "two-shot"),
                 "NCCL": lambda x=x: distributed.all_reduce(x)}  # fmt: skip
        if nbytes > all_reduce.one_shot_bytes:
            del forms["one-shot"]
        wrong = {}
        for name in list(forms)[:-1]:
            for _ in range(3):
                found = forms[name]()
                error = ((found.float() - exact).norm() / exact.norm()).item()
                if not error < 4e-3:
                    wrong[name] = f"wrong by {error:.1e}"
        x.zero_()  # NCCL adds up in place, again and again
        times = times_in_turns(ranks, {name: run for name, run in forms.items() if name not in wrong}, calls=20)
        table[nbytes] = times | wrong | {"chosen": all_reduce.method(x)[0]}
    return table


def products(ranks: Ranks) -> dict[str, dict]:
    """{problem: {form: seconds}}."""
    table = {}
    exchange = Exchange(ranks, most_bytes=max(ROWS) * HIDDEN * 2, least_rows=0)
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN // ranks.size, device=ranks.device, dtype=torch.bfloat16)
        down = torch.randn(WIDTH, HIDDEN // ranks.size, device=ranks.device, dtype=torch.bfloat16) / HIDDEN**0.5
        part = torch.randn(rows // ranks.size, WIDTH, device=ranks.device, dtype=torch.bfloat16)
        up = torch.randn(2 * HIDDEN // ranks.size, WIDTH, device=ranks.device, dtype=torch.bfloat16) / WIDTH**0.5

        def whole_scattered(x=x, down=down):
            output = x.new_empty(len(x) // ranks.size, WIDTH)
            distributed.reduce_scatter_tensor(output, x @ down.T)
            return output

        def whole_gathered(part=part, up=up):
            gathered = part.new_empty(ranks.size * len(part), WIDTH)
            distributed.all_gather_into_tensor(gathered, part)
            return gathered @ up.T

        for name, ours, theirs, alone in (
            ("product, scattered", lambda x=x, down=down: product_scattered(exchange, x, down), whole_scattered,
             lambda x=x, down=down: x @ down.T),
            ("gathered, product", lambda part=part, up=up: gathered_product(exchange, part, up), whole_gathered,
             lambda part=part, up=up: part.repeat(ranks.size, 1) @ up.T),
        ):  # fmt: skip
            found, exact = ours(), theirs()
            error = ((found.float() - exact.float()).norm() / exact.float().norm()).item()
            row = times_in_turns(ranks, {"overlapped": ours, "NCCL": theirs, "no exchange": alone}, calls=5)
            table[f"{name}, {rows} rows"] = row | {"difference": error}
    return table


def measured(ranks: Ranks) -> dict:
    links = measured_links(ranks, Exchange(ranks, most_bytes=256).meet)
    table = all_reduces(ranks)
    for nbytes, row in table.items():
        received = (ranks.size - 1) * nbytes
        row["model"] = min(links.seconds(received), links.seconds(2 * received / ranks.size, phases=2))
    return {"links": vars(links), "all_reduce": table, "products": products(ranks)}


def cell(value) -> str:
    return f"{value * 1e6:>12.1f}" if isinstance(value, float) else f"{str(value or '–'):>12}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print(f"bench links needs two GPUs of one host, and this machine has {gpus}.")
        return 0
    before, record = clocks(), {}
    for size in (2, 4):
        if gpus < size:
            print(f"\n{size} ranks: not run, this machine has {gpus} GPUs.")
            continue
        record[str(size)] = found = run_on_ranks(measured, size, seconds=400)[0]
        links = found["links"]
        print(f"\n{size} ranks: a rank receives {links['rate'] / 1e9:.0f} GB/s, a meeting takes "
              f"{links['latency'] * 1e6:.1f} µs, its own memory {links['memory_rate'] / 1e12:.2f} TB/s")  # fmt: skip
        print(f"{'all-reduce, µs':<22}{'one-shot':>12}{'two-shot':>12}{'NCCL':>12}{'model':>12}   chosen, of NCCL")
        for nbytes, row in found["all_reduce"].items():
            times = row.get(row["chosen"]), row["NCCL"]
            share = f"{times[0] / times[1]:.2f}" if all(isinstance(time, float) for time in times) else "–"
            print(f"{nbytes:<22,}" + "".join(cell(row.get(name)) for name in ("one-shot", "two-shot", "NCCL", "model"))
                  + f"   {row['chosen']}, {share}")  # fmt: skip
        print(f"{'products, µs':<34}{'overlapped':>12}{'NCCL':>12}{'no exchange':>12}  difference")
        for name, row in found["products"].items():
            print(f"{name:<34}" + "".join(cell(row[form]) for form in ("overlapped", "NCCL", "no exchange"))
                  + f"  {row['difference']:.0e}")  # fmt: skip
    write_record("links", before, ranks=record)
    return 0
