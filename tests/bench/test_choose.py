"""``bench/choose.py``: the committed page is its output, figures by hand, and what the plot looks like."""

# covers bench/choose.py zero/plan/planner.py

from __future__ import annotations

import pytest

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import choose
    import plot_style

RESULTS = ROOT / "bench" / "results"


def test_the_committed_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    choose.main([])
    page = capsys.readouterr().out
    assert page == (RESULTS / "choose.md").read_text()
    assert (RESULTS / "choose.png").stat().st_size > 10_000
    assert "Nothing on this page was measured" in page


def test_the_ratio_by_hand() -> None:
    """13B on 8 nodes of 8 A100 at 100 Gbit/s: three times 63 of 64 parts of 2 bytes; the slower links of the ring."""
    layers, hidden, tokens = 40, 5120, 4096
    numel = layers * (12 * hidden**2 + 13 * hidden) + (50257 + tokens + 2) * hidden
    flops = (6 * numel + 12 * layers * hidden * tokens) * tokens * 4 / 3
    network = 3 * 2 * numel * 63 / 64 / (100e9 / 8 * 0.9) + 3 * (layers + 3) * 29.8e-6
    found = choose.outlook(choose.model_of("13b"), choose.named_clusters()["A100 100G"], 1)
    assert found.ratio == pytest.approx(network / (flops / (312e12 * 0.45)), rel=1e-3)


def test_the_best_peer_is_the_base_and_only_what_fits_counts() -> None:
    for num_micro in choose.MICRO:
        for name, bases in (("gpt2-1.5b", {"ddp", "fsdp2", "hsdp"}), ("13b", {"fsdp2", "hsdp"}), ("70b", {"fsdp2"})):
            found = choose.outlook(choose.model_of(name), choose.cluster_of("A100", 100), num_micro)
            for bound in choose.BOUNDS:
                peers = found.speeds[bound].keys() - choose.OURS.keys()
                assert peers == bases, "70B in float32 over the 8 ranks of a node is more than 80 GiB each"
                assert max(found.speeds[bound][peer] for peer in peers) == 1
                assert found.best[bound].lower().startswith(tuple(p for p in peers if found.speeds[bound][p] == 1))
                assert found.best[bound].endswith(", once") <= (num_micro > 1)


def test_a_batch_is_compared_with_as_many_micro_batches() -> None:
    """FSDP2 gathers for each micro-batch, and once for a batch that fits; unlike things are not called by one name."""
    model, cluster = choose.model_of("70b"), choose.named_clusters()["H100 100G"]
    fsdp2 = {row.variant: row for row in choose.plan_peers(model, cluster, choose.Job(batch=4))}["FSDP2"]
    assert fsdp2.fits
    page = " ".join(choose._at_once())
    assert f"4 sequences at once, of which FSDP2 needs {fsdp2.memory.nbytes() / 2**30:.1f} GiB" in page
    (zeropp,) = choose.plan(model, cluster, choose.Job(batch=4), only=[choose.OURS["zero++"]])
    assert f"`zero++` has {zeropp.tokens_per_s / fsdp2.tokens_per_s:.2f} times its speed" in page


def test_what_the_guide_recommends_is_not_slower_in_the_table() -> None:
    """Without quantization the guide says HSDP on slow networks: stage 2 is not predicted to be faster."""
    for name in ("7b", "13b"):
        for machine, cluster in choose.named_clusters().items():
            found = choose.outlook(choose.model_of(name), cluster, 1)
            if found.ratio > 1:
                for bound in choose.BOUNDS:
                    assert found.best[bound] == "HSDP reshard=False", machine
                    assert found.speeds[bound]["zero stage 2"] < 1, machine


def test_slower_networks_favour_fewer_bytes() -> None:
    model = choose.model_of("13b")
    swept = [choose.outlook(model, choose.cluster_of("H100", gbit), 1) for gbit in (3200, 400, 100, 10, 1)]
    assert [one.ratio for one in swept] == sorted(one.ratio for one in swept)
    for bound in choose.BOUNDS:
        speeds = [one.speeds[bound]["delta-hpz"] for one in swept]
        assert speeds == sorted(speeds)
    hidden = choose.outlook(model, choose.cluster_of("H100", 10**6), 1).speeds["all hidden"]
    assert set(hidden.values()) == {1.0}, "on a network that is fast enough all compute only"


def test_few_curves_with_labels_in_the_style_of_bench() -> None:
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(choose, "SWEPT_GBIT", choose.SWEPT_GBIT[::5])
        panels = choose.figure_of().axes
    assert len(panels) == len(choose.MICRO) * len(choose.BOUNDS)
    for panel in panels:
        curves = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]
        assert 2 <= len(curves) <= plot_style.MAX_CURVES
        assert panel.get_legend() is None
        names = {str(curve.get_label()) for curve in curves}
        assert choose.NOT_DRAWN not in names
        marks = {text.get_text() for text in panel.texts} - names
        assert marks == {name for name in choose.named_clusters() if "sites" not in name}, "sites have other latency"
        assert {name: curve.get_color() for curve in curves for name in [str(curve.get_label())]} == {
            name: plot_style.style_of(name)["color"] for name in names
        }
        assert len({curve.get_color() for curve in curves}) == len(curves)


def test_each_choice_names_its_evidence() -> None:
    """Numbers are compared with the files by tests/test_documents.py; plain methods are among the choices."""
    text = (ROOT / "docs" / "results.md").read_text()
    _, _, after = text.partition("## Which to choose")
    section, _, _ = after.partition("\n## ")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert 6 <= len(rows) <= 8
    chosen = " ".join(choice for _, choice, _ in rows)
    assert all(name in chosen for name in ("DDP", "FSDP2", "HSDP", "delta-hpZ", "ZeRO++", "offload"))
    assert all(evidence.count("(../bench/results/") == 1 and any(map(str.isdigit, evidence)) for *_, evidence in rows)
    assert "docs/results.md#which-to-choose" in (ROOT / "README.md").read_text()
