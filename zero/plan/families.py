"""Count the parameters of a language model from the fields of its transformers configuration, exact to the element.

    gpt2                     learned positions, plain MLP, biases, LayerNorm
    opt                      as gpt2; narrower embeddings have two projections
    gpt_neox                 rotary positions, plain MLP, biases, LayerNorm
    llama, mistral, qwen2,   rotary positions, fewer key-value heads, gated MLP, RMSNorm; biases of attention in qwen2,
    qwen3                    norms of queries and keys in qwen3
    mixtral                  mistral with a router and experts for its MLP

Other families are refused, and so are fields that add parameters which are not counted here: a wrong count would plan
for the wrong memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zcomm import ConfigError


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit: parameters of one dtype that are gathered as one; the model has ``repeats`` of them."""

    numels: tuple[int, ...]
    """Elements of each parameter."""
    repeats: int = 1
    is_trainable: bool = True
    is_layer: bool = False
    """Whether the model has one for each layer."""

    @property
    def numel(self) -> int:
        """Elements of one unit."""
        return sum(self.numels)


REMEDY = (
    "give the model on the meta device to zero.plan.Model.of_module, or its size by --parameters and --layers"
    " (zero.plan.Model.of_numel)"
)
UNCOUNTED = ("expert", "moe", "cross_attention", "encoder_decoder", "nextn", "pruned", "auto_map")
"""Parts of field names: fields that, if set, add or remove parameters."""
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a model, read from its configuration."""

    units: tuple[PlannedUnit, ...]
    num_layers: int
    hidden: int
    positions: int
    """The longest sequence."""
    has_table: bool = False
    """Whether positions are learned parameters, so that longer sequences are impossible."""
    idle_numel: int = 0
    """Elements of a layer that a token does not use: experts that it is not routed to."""
    read: str
    """What was read, as text for the user."""


class _Fields:
    """Typed access to a configuration's values; errors name the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.family = str(values.get("model_type"))

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; ``default`` if the field is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} of a {self.family} model must be a positive integer: {name}={value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a bool; ``default`` if the field is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ConfigError(f"{name} of a {self.family} model must be true or false: {name}={value!r}")
        return value


def shape_of(values: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a language model from the dict of its ``config.json``.

    Raises:
        ConfigError: The family is not in :data:`FAMILIES`, a field is missing, or a field is set that is not counted.
    """
    fields = _Fields(values)
    if fields.family not in FAMILIES:
        raise ConfigError(
            f"the parameters of model_type={values.get('model_type')!r} are not known, only those of "
            f"{', '.join(FAMILIES)}: {REMEDY}"
        )
    read, counted = FAMILIES[fields.family]
    for name in values:
        if values[name] and name not in counted and any(part in name for part in UNCOUNTED):
            raise ConfigError(
                f"{name}={values[name]!r} changes a {fields.family} model's parameters and is not counted: {REMEDY}"
            )
    for name in values.get("architectures") or ():
        if not str(name).endswith(LANGUAGE_MODELS):
            raise ConfigError(f"only language models are counted, not architectures={name!r}: {REMEDY}")
    return read(fields)


def _linear(inputs: int, outputs: int, *, has_bias: bool) -> tuple[int, ...]:
    return (inputs * outputs, outputs) if has_bias else (inputs * outputs,)


def _units(*numels: tuple[int, ...] | PlannedUnit) -> tuple[PlannedUnit, ...]:
    """Make units, and drop those without parameters."""
    units = [found if isinstance(found, PlannedUnit) else PlannedUnit(found) for found in numels]
    return tuple(unit for unit in units if unit.numels)


def _tied(*, is_tied: bool) -> str:
    return "tied embeddings" if is_tied else "embeddings not tied"


def _gpt2(fields: _Fields) -> ModelShape:
    h, layers, vocabulary = (
        fields.positive_int("n_embd"),
        fields.positive_int("n_layer"),
        fields.positive_int("vocab_size"),
    )
    positions, inner = fields.positive_int("n_positions"), fields.positive_int("n_inner", 4 * h)
    is_tied = fields.flag("tie_word_embeddings", default=True)
    attention = _linear(h, 3 * h, has_bias=True) + _linear(h, h, has_bias=True)
    mlp = _linear(h, inner, has_bias=True) + _linear(inner, h, has_bias=True)
    layer = PlannedUnit((h, h, *attention, h, h, *mlp), layers, is_layer=True)
    head = () if is_tied else (vocabulary * h,)
    return ModelShape(
        units=_units((vocabulary * h,), (positions * h,), layer, (h, h), head),
        num_layers=layers,
        hidden=h,
        positions=positions,
        has_table=True,
        read=f"gpt2: MLP of 2 x {inner}, a table of {positions} positions, {_tied(is_tied=is_tied)}",
    )


def _opt(fields: _Fields) -> ModelShape:
    h, layers, vocabulary = (
        fields.positive_int("hidden_size"),
        fields.positive_int("num_hidden_layers"),
        fields.positive_int("vocab_size"),
    )
    positions, inner = fields.positive_int("max_position_embeddings"), fields.positive_int("ffn_dim")
    width = fields.positive_int("word_embed_proj_dim", h)
    is_tied, has_bias = fields.flag("tie_word_embeddings", default=True), fields.flag("enable_bias", default=True)
    norm = (h, h) if fields.flag("layer_norm_elementwise_affine", default=True) else ()
    ends_with_norm = fields.flag("do_layer_norm_before", default=True) and not fields.flag(
        "_remove_final_layer_norm", default=False
    )
    attention = 4 * _linear(h, h, has_bias=has_bias)
    mlp = _linear(h, inner, has_bias=has_bias) + _linear(inner, h, has_bias=has_bias)
    projection = () if width == h else (width * h,)
    tied = _tied(is_tied=is_tied)
    return ModelShape(
        units=_units(
            (vocabulary * width,),
            ((positions + 2) * h,),  # two are for padding
            *(projection, projection),
            norm if ends_with_norm else (),
            PlannedUnit((*attention, *norm, *mlp, *norm), layers, is_layer=True),
            () if is_tied else (vocabulary * width,),
        ),
        num_layers=layers,
        hidden=h,
        positions=positions,
        has_table=True,
        read=f"opt: MLP of 2 x {inner}, embeddings of {width}, a table of {positions} positions, {tied}",
    )


def _gpt_neox(fields: _Fields) -> ModelShape:
    h, layers, vocabulary = (
        fields.positive_int("hidden_size"),
        fields.positive_int("num_hidden_layers"),
        fields.positive_int("vocab_size"),
    )
    inner, is_tied = fields.positive_int("intermediate_size"), fields.flag("tie_word_embeddings", default=False)
    has_bias = fields.flag("attention_bias", default=True)
    attention = _linear(h, 3 * h, has_bias=has_bias) + _linear(h, h, has_bias=has_bias)
    mlp = _linear(h, inner, has_bias=True) + _linear(inner, h, has_bias=True)
    layer = PlannedUnit((h, h, h, h, *attention, *mlp), layers, is_layer=True)
    return ModelShape(
        units=_units((vocabulary * h,), layer, (h, h), () if is_tied else (vocabulary * h,)),
        num_layers=layers,
        hidden=h,
        positions=fields.positive_int("max_position_embeddings"),
        read=f"gpt_neox: MLP of 2 x {inner}, {_tied(is_tied=is_tied)}",
    )


def _llama(fields: _Fields) -> ModelShape:
    """Llama, and the families that are variants of it."""
    family, h, layers = fields.family, fields.positive_int("hidden_size"), fields.positive_int("num_hidden_layers")
    vocabulary, inner, heads = (
        fields.positive_int(n) for n in ("vocab_size", "intermediate_size", "num_attention_heads")
    )
    kv_heads = fields.positive_int(
        "num_key_value_heads", heads if family == "llama" else None
    )  # older llama configurations lack the field
    head_dim = fields.positive_int("head_dim", None if family == "qwen3" else h // heads)
    may_have_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", default=False)
    q, kv, out = (
        _linear(h, heads * head_dim, has_bias=may_have_bias or family == "qwen2"),
        _linear(h, kv_heads * head_dim, has_bias=may_have_bias or family == "qwen2"),
        _linear(heads * head_dim, h, has_bias=may_have_bias),
    )
    norms_of_heads = (head_dim, head_dim) if family == "qwen3" else ()
    mlp, idle, of_mlp = _gated_mlp(fields, h, inner)
    is_tied = fields.flag("tie_word_embeddings", default=False)
    tied = _tied(is_tied=is_tied)
    layer = PlannedUnit((*q, *kv, *kv, *out, *norms_of_heads, *mlp, h, h), layers, is_layer=True)
    return ModelShape(
        units=_units((vocabulary * h,), layer, (h,), () if is_tied else (vocabulary * h,)),
        num_layers=layers,
        hidden=h,
        positions=fields.positive_int("max_position_embeddings"),
        idle_numel=idle,
        read=f"{family}: {heads} heads of {head_dim}, {kv_heads} of keys and values, {of_mlp}, {tied}",
    )


def _gated_mlp(fields: _Fields, h: int, inner: int) -> tuple[tuple[int, ...], int, str]:
    """The sizes of the MLP's parameters, the elements of them that a token does not use, and a text."""
    if fields.family != "mixtral":
        has_bias = fields.family == "llama" and fields.flag("mlp_bias", default=False)
        return 2 * _linear(h, inner, has_bias=has_bias) + _linear(inner, h, has_bias=has_bias), 0, f"MLP of 3 x {inner}"
    experts, used = fields.positive_int("num_local_experts"), fields.positive_int("num_experts_per_tok")
    if used > experts:
        raise ConfigError(
            f"num_experts_per_tok must be at most num_local_experts: num_experts_per_tok={used}, "
            f"num_local_experts={experts}"
        )
    mlp = (experts * h, experts * 2 * inner * h, experts * h * inner)  # the router, and experts in two tensors
    return mlp, (experts - used) * 3 * inner * h, f"{experts} experts of 3 x {inner} and {used} of them a token"


FAMILIES: Mapping[str, tuple[Callable[[_Fields], ModelShape], tuple[str, ...]]] = {
    "gpt2": (_gpt2, ()),
    "opt": (_opt, ()),
    "gpt_neox": (_gpt_neox, ()),
    "llama": (_llama, ()),
    "mistral": (_llama, ()),
    "qwen2": (_llama, ()),
    "qwen3": (_llama, ()),
    "mixtral": (_llama, ("num_local_experts", "num_experts_per_tok")),
}
"""By model_type: the function that reads it, and fields of ``UNCOUNTED`` that it does count."""
