"""Recipes: the wire formats of weights and gradients, by name, for install_ddp and install_fsdp2.

    weights     FSDP2's parameters, gathered before use
    gradients   (inside the node, between nodes) of the two-hop reduce-scatter
    reduced     DDP's reduced gradients, gathered so that every rank has them all

The error of a recipe is the relative error of the mean of 8 ranks' Gaussian gradients over 2 nodes x 4 ranks, after
the reduce-scatter; bytes between nodes are relative to the same exchange in bf16.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import NamedTuple

from zcomm._formats.formats import Format, get_format
from zcomm.errors import ConfigError, FormatError

Wire = str | Format
DEFAULT_RECIPE = "zeropp"


class Wires(NamedTuple):
    weights: Format
    gradients: tuple[Format, Format]
    reduced: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The formats of everything that a training step sends.

    A format is a name (``"int8"``), one with options (``"int8/2048"``) or a :class:`zcomm.Format`. Change a row of
    the table with ``dataclasses.replace(zcomm.RECIPES["zeropp"], weights="none")``.
    """

    name: str = "own"
    """For reports."""
    weights: Wire = "int8"
    """Format of FSDP2's parameters. Not stochastic: forward and backward must gather the same values."""
    gradients: tuple[Wire, Wire] = ("int4", "int4")
    """Formats of the reduce-scatter: inside the node, between nodes."""
    reduced: Wire = "int8"
    """Format of DDP's reduced gradients, in the all-gather."""
    residual: bool = False
    """Error feedback: what encoding for the second hop loses is added at the next step."""
    residual_beta: float = 1.0
    """Factor of the residual before it is added, in (0, 1]. Below 1 old losses fade (LoCo's damping), and a fraction
    1 - beta of each loss is never made up for."""
    residual_reset_interval: int = 0
    """Exchanges of a buffer after which its residual is reset to zero (LoCo's reset); 0: never."""
    seed: int = 0
    """Seed for gradients that are rounded stochastically: exchange number ``i`` of an installation uses
    ``RandomKey(seed, i // 2**32, i % 2**32)``. :meth:`Installation.state_dict` holds the number."""
    error: float = math.nan
    """Relative error of the mean, measured as described above; NaN if not measured."""
    min_numel: int = 2048
    """Parameters of fewer elements are not quantized: norms and biases are small, and sensitive to errors."""
    description: str = ""
    """One sentence."""

    def wires(self) -> Wires:
        """The formats, looked up.

        Raises:
            FormatError: There is no such format, or ``gradients`` is not a pair.
        """
        if not isinstance(self.gradients, tuple) or len(self.gradients) != 2:
            raise FormatError(f"gradients must be a pair (inside the node, between nodes): got {self.gradients!r}")
        intra, inter = self.gradients
        return Wires(get_format(self.weights), (get_format(intra), get_format(inter)), get_format(self.reduced))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="zeropp",
            error=0.168,
            description="INT8 B256 weights, INT4 B128 gradients on both hops: ZeRO++ in small blocks",
        ),
        Recipe(
            name="zeropp-paper",
            weights="int8/2048",
            gradients=("int4/2048", "int4/2048"),
            reduced="int8/2048",
            error=0.215,
            description="ZeRO++ in blocks of 2048: 2 percent fewer bytes, a quarter more error",
        ),
        Recipe(
            name="accurate",
            gradients=("int8", "nf4"),
            residual=True,
            error=0.093,
            description="INT8 inside the node, NF4 B64 with a residual between nodes: errors do not accumulate",
        ),
        Recipe(
            name="smallest",
            gradients=("nf4/128", "nf4/128"),
            reduced="nf4/128",
            error=0.136,
            description="4 bits per element for gradients both ways; weights stay INT8: 4 bits would cost quality",
        ),
    )
}
"""By name."""


AUTO_RECIPE = Recipe(
    name="auto",
    weights="none",
    gradients=("none", "none"),
    reduced="none",
    description="what `zcomm probe` found fastest on these links; without a probe nothing is quantized",
)
"""A placeholder: an installation takes the formats from the probe table that all ranks have agreed on."""


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name, or ``recipe`` itself.

    Raises:
        ConfigError: There is no recipe of that name (the error suggests the nearest), or it is not a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise ConfigError(f"recipe must be a name or a zcomm.Recipe: got {recipe!r}")
    known = {**RECIPES, AUTO_RECIPE.name: AUTO_RECIPE}
    if recipe not in known:
        close = difflib.get_close_matches(recipe, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"recipe must be one of {', '.join(known)}, or a zcomm.Recipe: recipe={recipe!r}{hint}")
    return known[recipe]
