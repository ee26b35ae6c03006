"""``format="auto"``: the choice from the probe's file agrees on all ranks, also if files differ or are missing."""

# covers zcomm/_bench/probe.py zcomm/_collectives/auto_format.py

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import run_ranks
from tests.variables import variables
from zcomm import ConfigError, Topology, ZcommError, cli
from zcomm._base import env
from zcomm._bench.probe import choose_confirmed, choose_fastest
from zcomm._collectives import auto_format
from zcomm._collectives.auto_format import NONE, FormatTable, ProbedChoice

SHAPE = "2x2 on 1 host"
CPU = torch.device("cpu")
CHOICES: dict[str, Any] = {
    "all_gather": [[4096, "int8", 2], [65536, "none", 1]],
    "reduce_scatter": [[4096, "int8+int4", 2], [65536, "int4", 1]],
    "all_reduce": [[4096, "int8+int4", 2], [65536, "none", 1]],
    "all_to_all": [[4096, "int8", 1]],
}


def _file(tmp_path: Path, choices: dict[str, Any] = CHOICES, device: str = "cpu") -> str:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"version": 1, "topologies": {SHAPE: {"device": device, "choices": choices}}}))
    return str(path)


@contextmanager
def _topology_with(path: str) -> Iterator[Topology]:
    """A Topology of two nodes on ranks whose ``ZCOMM_PROBE`` is ``path``."""
    with variables(ZCOMM_PROBE=path), closing(Topology(ranks_per_node=2)) as t:
        yield t


def _sent_formats(call: Any) -> set[tuple[str, str]]:
    with zcomm.traffic() as sent:
        call()
    return {(key.format, key.link) for key in sent.counts}


def _check_choices(rank: int, path: str) -> None:
    both = {("int8", "intra"), ("int8", "inter")}
    with _topology_with(path if rank == 0 else f"/no/file/of/rank/{rank}") as t:
        for numel, expected in ((16, "none"), (1024, "int8")):
            full, shard = torch.empty(numel), torch.full((numel // 4,), float(rank))
            used = _sent_formats(lambda f=full, s=shard: zcomm.all_gather_single(f, s, t, format="auto"))
            assert {name for name, _ in used} >= {expected}
            assert torch.allclose(full.view(4, -1), torch.arange(4.0).unsqueeze(1), rtol=0.01)
        out, x = torch.empty(256), torch.ones(1024)
        used = _sent_formats(lambda: zcomm.reduce_scatter_single(out, x, group=t, format="auto"))
        assert used == {("int8", "intra"), ("int4", "inter")}
        out, x = torch.empty(4096), torch.ones(16384)
        used = _sent_formats(lambda: zcomm.reduce_scatter_single(out, x, group=t, format="auto"))
        assert used == {("int4", "intra"), ("int4", "inter")}  # one hop: both kinds of peers at once
        assert torch.allclose(out, torch.tensor(4.0), rtol=0.01)
        used = _sent_formats(lambda: zcomm.all_to_all_single(torch.empty(1024), torch.ones(1024), t, format="auto"))
        assert used == both
        _check_all_reduce(rank, t)


def _check_all_reduce(rank: int, t: Topology) -> None:
    ones = torch.ones(1024)
    used = _sent_formats(lambda: zcomm.all_reduce(ones, group=t, format="auto"))
    assert used == {("int8", "intra"), ("int4", "inter")}
    for numel in (16384, 16387):  # one hop, exact
        total = torch.arange(numel) + float(rank)
        work = zcomm.all_reduce(total, group=t, format="auto", async_op=True)
        agreed = zcomm.control.agree_max(torch.tensor([rank]), t)  # over the same group: behind it
        assert agreed.tolist() == [3]
        assert work is not None
        work.wait()
        assert torch.equal(total, 4.0 * torch.arange(numel) + 6)


def test_ranks_choose_what_the_first_rank_read(tmp_path: Path) -> None:
    run_ranks(4, _check_choices, _file(tmp_path))


def _check_local_rows(rank: int, path: str) -> None:
    """Rows in local numbering take two hops: over one hop they would be the rows of other ranks."""
    with _topology_with(path) as t:
        full, shard = torch.empty(32768), torch.full((8192,), float(rank))
        zcomm.all_gather_single(full, shard, t, format="auto", numbering="local")
        assert full.view(4, -1)[:, 0].tolist() == [0.0, 2.0, 1.0, 3.0]


def test_rows_numbered_local(tmp_path: Path) -> None:
    run_ranks(4, _check_local_rows, _file(tmp_path))


def _check_uncompressed(rank: int, path: str) -> None:
    with _topology_with(path) as t:
        for group in (t, None):
            x = torch.linspace(0, 1, 40_000) + rank
            exact, got = torch.empty(160_000), torch.empty(160_000)
            used = _sent_formats(lambda x=x, g=group, got=got: zcomm.all_gather_single(got, x, g, format="auto"))
            zcomm.all_gather_single(exact, x, group)
            assert torch.equal(got, exact)
            assert {name for name, _ in used} <= {"none", "control"} | {"none"}


def test_without_a_probe_of_these_nodes_and_device_it_is_uncompressed(tmp_path: Path) -> None:
    run_ranks(4, _check_uncompressed, "/no/such/file")
    run_ranks(4, _check_uncompressed, _file(tmp_path, device="cuda"))
    other = tmp_path / "other.json"
    other.write_text('{"version": 1, "topologies": {"4x8 on 4 hosts": {"device": "cpu", "choices": {}}}}')
    run_ranks(4, _check_uncompressed, str(other))


def _check_broken(rank: int, path: str) -> None:
    with _topology_with(path if rank == 0 else "/no/such/file") as t:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"broken.json is not a file of `zcomm probe`: .*delete it"):
                zcomm.all_gather_single(torch.empty(4), torch.empty(1), t, format="auto")
        zcomm.all_gather_single(torch.empty(4), torch.empty(1), t)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 2}', '{"version": 1}', "\x00", '{"version": 1, "topologies": {"SHAPE": {}}}',
        '{"version": 1, "topologies": {"SHAPE": {"device": "cpu", "choices": {"all_gather": [[1, "int5", 2]]}}}}',
        '{"version": 1, "topologies": {"SHAPE": {"device": "cpu", "choices": {"all_gather": [[1, "int8", 3]]}}}}',
        '{"version": 1, "topologies": {"SHAPE": {"device": "cpu", "choices": {"a": [[1, "int4:stochastic", 2]]}}}}',
    ],
)  # fmt: skip
def test_a_broken_file_is_the_same_error_on_every_rank(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text.replace("SHAPE", SHAPE))
    run_ranks(4, _check_broken, str(path))


def test_a_choice_holds_from_its_size_on() -> None:
    rows = {"all_gather": [(1000, ProbedChoice.parse("int8", 2)), (5000, ProbedChoice.parse("int4", 1))]}
    table = FormatTable("cpu", rows)
    found = [str(table.choose("all_gather", n, CPU).inside) for n in (1, 999, 1000, 4999, 5000, 10**9)]
    assert found == ["none", "none", "int8", "int8", "int4", "int4"]
    assert table.choose("all_reduce", 5000, CPU) == ProbedChoice.parse("none", 2)
    assert table.choose("all_gather", 5000, torch.device("cuda")) == ProbedChoice.parse("none", 2)
    assert table.has_one_hop
    small = FormatTable(
        "cpu",
        {"all_gather": [(4096, ProbedChoice.parse("none", 1))], "all_reduce": [(4096, ProbedChoice.parse("int8", 1))]},
    )
    assert small.choose("all_gather", 1, CPU) == ProbedChoice.parse("none", 1)  # fewer bytes cost no more hops
    assert small.choose("all_reduce", 1, CPU) == ProbedChoice.parse("none", 2)
    assert not FormatTable().has_one_hop


def test_nothing_is_chosen_that_was_not_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """At any size and for any collective: auto chooses a row of its table, or exact."""
    rows = {"all_gather": [(1000, ProbedChoice.parse("int8", 2)), (5000, ProbedChoice.parse("bf16", 1))]}
    table = FormatTable("cpu", rows)
    allowed = {NONE, *(choice for _, choice in rows["all_gather"])}
    sizes = [2**power + shift for power in range(40) for shift in (-1, 0, 1)]
    assert {table.choose("all_gather", nbytes, CPU) for nbytes in sizes} == allowed
    assert {table.choose("reduce_scatter", nbytes, CPU) for nbytes in sizes} == {NONE}
    for text in ("int8:stochastic", "int8+int4:stochastic", "auto"):
        with pytest.raises(SystemExit):
            cli.main(["probe", "--formats", text])
        assert "must round to nearest" in capsys.readouterr().err
        with pytest.raises(ZcommError):
            ProbedChoice.parse(text, 2)


def test_a_choice_must_be_worth_it() -> None:
    default = ("none", 2)
    assert choose_fastest({default: 1.0, ("none", 1): 0.95, ("int8", 2): 0.85}, default=default) == default
    assert choose_fastest({default: 1.0, ("none", 1): 0.85, ("int8", 2): 0.75}, default=default) == ("none", 1)
    assert choose_fastest({default: 1.0, ("none", 1): 0.95, ("int8", 2): 0.75}, default=default) == ("int8", 2)


@pytest.mark.parametrize(
    ("trials", "chosen", "num_trials"),
    [
        ([(1.0, 0.95, 0.5)] * 3, ("int8", 2), 3),
        ([(1.0, 0.95, 0.5), (1.0, 0.95, 0.9)], ("none", 2), 2),  # int8 was lucky once
        ([(1.0, 0.95, 0.5), (1.0, 0.5, 0.9), (1.0, 0.5, None)], ("none", 1), 3),
        ([(1.0, 0.5, 0.9), (1.0, 0.5, None), (1.0, 0.95, None)], ("none", 2), 3),
        ([(1.0, 0.95, 0.9)], ("none", 2), 1),
    ],
)
def test_a_choice_is_made_every_time(trials: list[tuple[float, ...]], chosen: tuple[str, int], num_trials: int) -> None:
    ways = [("none", 2), ("none", 1), ("int8", 2)]
    times = iter(trials)
    asked: list[int] = []

    def trial(keys: Iterable[tuple[str, int]]) -> dict[tuple[str, int], float]:
        found = dict(zip(ways, next(times), strict=True))
        keys = list(keys)
        asked.append(len(keys))
        assert {key for key, seconds in found.items() if seconds is not None} == set(keys)
        return {key: found[key] for key in keys}

    best, p50 = choose_confirmed(trial, ways, default=("none", 2))
    assert best == chosen
    assert len(asked) == num_trials
    assert p50.keys() == set(ways)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ZCOMM_PROBE", raising=False)
    env.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert auto_format.probe_path() == tmp_path / "zcomm" / "probe.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert auto_format.probe_path() == Path.home() / ".cache" / "zcomm" / "probe.json"


def _check_speed(rank: int, numel: int) -> None:
    """Of 200 pairs auto may exceed the limit in half; 130 would be no coincidence (4 standard deviations)."""
    with _topology_with("/no/such/file") as t:
        full, shard = torch.empty(4 * numel), torch.ones(numel)
        taken: dict[str, list[float]] = {"auto": [], "none": []}
        for pair in range(203):
            for wire in sorted(taken, reverse=pair % 2 == 1):
                dist.barrier()
                start = time.perf_counter()
                zcomm.all_gather_single(full, shard, t, format=wire)  # ends when all ranks have started it
                taken[wire].append(time.perf_counter() - start)
        limit = max(0.05 * statistics.median(taken["none"]), 20e-6 if 16 * numel < 2**16 else 0)
        slower = [a - b > limit for a, b in zip(taken["auto"][3:], taken["none"][3:], strict=True)]
        assert sum(slower) < 130, f"{sum(slower)} of {len(slower)}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nbytes", [2**10, 2**14, 2**18, 2**22])
def test_auto_is_no_slower_on_links_that_are_not_known_to_be_slow(nbytes: int) -> None:
    run_ranks(4, _check_speed, nbytes // 16)


def test_the_decision_costs_microseconds() -> None:
    t, x = Topology.single(), torch.zeros(1024)
    auto_format.table_of(t)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        auto_format.resolve("auto", "all_gather", t, x, 1024, first="inter")
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 20e-6
