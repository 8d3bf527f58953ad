"""What `bench ring` measures: each row is compared with one rank, and the table says what became of it."""

import torch

from course_lib.bench import ring as bench
from course_lib.hardware.ranks import Ranks
from course_lib.kernels.attention.reference import attention_reference

SMALL = bench.Problem(6, query_heads=1, key_heads=1, head_dim=16, dtype=torch.float32)


def test_every_row_is_attention_and_one_that_is_not_has_no_time(monkeypatch):
    for module in (bench, bench.ring, bench.heads_for_sequence):
        monkeypatch.setattr(module, "attention", attention_reference)
    wrong = "contiguous"
    ways = bench.ways(Ranks(0, 1, torch.device("cpu")), SMALL.length)
    run, places = ways[wrong]
    ways[wrong] = lambda query, key, value: run(query, key, value) * 1.1, places
    monkeypatch.setattr(bench, "ways", lambda ranks, length: ways)
    (results,) = bench.measure_rank(Ranks(0, 1, torch.device("cpu")), [SMALL], None, 1)
    assert results.pop(wrong)["missing"].startswith("wrong on 1 ranks; this one differs by 1.0e-01")
    assert len(results) == 4
    for row in results.values():  # which is the longer, a busy machine decides
        assert row["forward"] > 0 and row["both"] > 0 and row["difference"] < 1e-5


def test_a_time_is_that_of_the_slowest_rank_and_a_share_that_of_all_gpus(capsys):
    problem = bench.Problem(131072)
    one = {"one rank": {"forward": 0.2, "both": 0.9, "difference": 0.0}, "in turn": {"missing": "wrong"}}
    ranks = [[one | {"ring": {"forward": forward, "both": 0.5, "difference": 1e-3}}] for forward in (0.1, 0.125)]
    (results,) = bench.slowest(ranks)
    bench.print_table(problem, 2, results)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("ring"))
    assert "125.0 ms" in line and " 1126 " in line and " 80.0 %" in line and " 90.0 %" in line
