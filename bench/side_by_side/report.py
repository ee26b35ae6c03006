"""Make the table of the runs of one model: a row for each configuration, over its seeds.

The ± is a standard error: the standard deviation over the seeds, by the square root of their number. Differences from
the baseline are paired: each is between two runs of one seed, so what the seed alone does cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from side_by_side.configurations import BASELINE, CONFIGURATIONS, baseline_of
from side_by_side.records import Record
from zcomm.volume import inter_node_model_units

__all__ = ["Row", "rows_of", "table"]

HEADER = [
    "configuration", "seeds", "held-out loss", f"minus {BASELINE}", "M between nodes / step", "gradient error",
    "weight error at step 20", "at the end", "bf16 rounding", "drift", "ms / step",
]  # fmt: skip


@dataclass
class Row:
    """The runs of one configuration."""

    name: str
    records: list[Record]

    @property
    def finished(self) -> list[Record]:
        """Return the runs with all steps."""
        return [record for record in self.records if record.is_finished]

    @property
    def error(self) -> str:
        """Return the error of a run that has failed; empty if there is none."""
        return next((record.error for record in self.records if record.error), "")

    @property
    def losses(self) -> dict[int, float]:
        """The last held-out loss, by seed."""
        return {record.key.seed: record.held_out_losses[-1][1] for record in self.finished}

    def differences(self, baseline: Row) -> list[float]:
        """Differences of the losses from the baseline's with the same seed."""
        return [loss - baseline.losses[seed] for seed, loss in self.losses.items() if seed in baseline.losses]

    @property
    def inter_units(self) -> float:
        """Bytes between nodes in a step, in M: the mean over the seeds."""
        first = self.finished[0]
        nbytes = statistics.fmean(record.inter_nbytes_per_step for record in self.finished)
        return inter_node_model_units(nbytes, int(first.nodes_x_ranks.split("x")[0]), first.numel)

    @property
    def drift(self) -> float:
        """The last weight error over the larger of the first one and bf16's rounding; of the worst seed."""
        ratios = []
        for record in self.finished:
            (_, first), (_, last) = record.weight_errors[0], record.weight_errors[-1]
            floor = max(first["weights"], last["rounding"])
            ratios.append(last["weights"] / floor if floor else 0.0)
        return max(ratios)

    def _difference(self, baseline: Row) -> str:
        """The paired difference from the baseline, with the number of seeds that both have."""
        if self.name == baseline.name:
            return "baseline"
        found = self.differences(baseline)
        num_seeds = "one seed" if len(found) == 1 else f"{len(found)} seeds"
        return f"{_mean_and_error(found, '+.4f')} ({num_seeds})" if found else "-"

    def _weight_cells(self, errors: Sequence[list[tuple[int, dict[str, float]]]]) -> list[str]:
        """The weight errors at the first sample and at the end, the rounding at the end, and the drift."""
        parts = ((0, "weights"), (-1, "weights"), (-1, "rounding"))
        means = (statistics.fmean(of[place][1][part] for of in errors) for place, part in parts)
        return [*(f"{mean:.5f}" for mean in means), f"{self.drift:.2f}"]

    def cells(self, baseline: Row) -> list[str]:
        """The cells of :data:`HEADER`."""
        if not self.finished:
            return [self.name, "0", self.error or "not run", *[""] * (len(HEADER) - 3)]
        weights = [record.weight_errors for record in self.finished]
        errors = [error for record in self.finished for _, error in record.gradient_errors]
        return [
            self.name,
            str(len(self.finished)),
            _mean_and_error(list(self.losses.values()), ".4f"),
            self._difference(baseline),
            f"{self.inter_units:.3f}" + ("" if self.finished[0].is_counted else " (formula)"),
            f"{statistics.fmean(errors):.4f}" if errors else "-",
            *(self._weight_cells(weights) if all(weights) else ["-"] * 4),  # nodes that train apart are not sampled
            f"{1e3 * statistics.fmean(record.seconds / record.steps_done for record in self.finished):.0f}",
        ]


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return the rows in the order of :data:`CONFIGURATIONS`, without configurations that have no record."""
    rows = [Row(name, [r for r in records if r.key.configuration == name]) for name in CONFIGURATIONS]
    return [row for row in rows if row.records]


def table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with the library's warnings."""
    by_name = {row.name: row for row in rows}
    baselines = [by_name.get(name, Row(name, [])) for name in map(baseline_of, by_name)]
    lines = [HEADER, ["---"] * len(HEADER), *map(Row.cells, rows, baselines)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [f"- {record.key}: {line}" for row in rows for record in row.records for line in record.log]
    notes += [
        f"- {record.key}: skipped steps {record.skipped_steps}"
        for row in rows for record in row.records if record.skipped_steps
    ]  # fmt: skip
    notes += [
        f"- {record.key}: changes have {statistics.fmean(bits for _, bits in found):.3f} bits an element, the mean of "
        f"{len(found)} steps"
        for row in rows for record in row.records if (found := record.change_entropies)
    ]  # fmt: skip
    return "\n".join([text, *([""] if notes else []), *notes])


def _mean_and_error(values: Sequence[float], spec: str) -> str:
    """``mean ± standard error``; a single value has no error."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{spec}}{error}"
