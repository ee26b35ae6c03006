"""The parameters of transformers' language models, by the fields of their configuration, exact to the element.

    gpt2                     table of positions, plain MLP, biases, LayerNorm
    opt                      the same; narrower embeddings come with two projections
    gpt_neox                 rotary positions, plain MLP, biases, LayerNorm
    llama, mistral, qwen2,   rotary positions, fewer key-value heads, gated MLP, RMSNorm; biases of attention in qwen2,
    qwen3                    norms of queries and keys in qwen3
    mixtral                  mistral with a router and experts for its MLP

Any other family, and any field that adds parameters which are not counted here, is refused: a count is right or it is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zcomm import ConfigError


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """Parameters of one kind that are gathered together, ``repeats`` times the same."""

    numels: tuple[int, ...]
    """Elements of each parameter."""
    repeats: int = 1
    is_trainable: bool = True
    is_layer: bool = False
    """Whether it is there once for each layer of the model."""

    @property
    def numel(self) -> int:
        """Elements of one."""
        return sum(self.numels)


REMEDY = (
    "give the model on the meta device to zero.plan.Model.of_module, or its size by --parameters and --layers"
    " (zero.plan.Model.of_numel)"
)
UNCOUNTED = ("expert", "moe", "cross_attention", "encoder_decoder", "nextn", "pruned", "auto_map")
"""Parts of the names of fields that, where they are set, add or remove parameters."""
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a configuration says."""

    units: tuple[PlannedUnit, ...]
    num_layers: int
    hidden: int
    positions: int
    """The longest sequence."""
    has_table: bool = False
    """Whether positions have parameters, which longer sequences lack."""
    idle_numel: int = 0
    """Elements of a layer that a token does not use: the experts that it is not sent to."""
    read: str
    """In words, for people."""


class _Fields:
    """A configuration's values, or a named error."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.family = str(values.get("model_type"))

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` where there is none."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} of a {self.family} model must be a positive whole number: {name}={value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ConfigError(f"{name} of a {self.family} model must be true or false: {name}={value!r}")
        return value


def shape_of(values: Mapping[str, Any]) -> ModelShape:
    """Of the dict of a ``config.json``, with the head of a language model.

    Raises:
        ConfigError: The family is none of :data:`FAMILIES`, a field is missing, or one is set that is not counted.
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
    """Those that have parameters."""
    units = [found if isinstance(found, PlannedUnit) else PlannedUnit(found) for found in numels]
    return tuple(unit for unit in units if unit.numels)


def _tied(*, is_tied: bool) -> str:
    return "tied embeddings" if is_tied else "embeddings not tied"


def _gpt2(fields: _Fields) -> ModelShape:
    h, layers, vocabulary = fields.whole("n_embd"), fields.whole("n_layer"), fields.whole("vocab_size")
    positions, inner = fields.whole("n_positions"), fields.whole("n_inner", 4 * h)
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
    h, layers, vocabulary = fields.whole("hidden_size"), fields.whole("num_hidden_layers"), fields.whole("vocab_size")
    positions, inner = fields.whole("max_position_embeddings"), fields.whole("ffn_dim")
    width = fields.whole("word_embed_proj_dim", h)
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
    h, layers, vocabulary = fields.whole("hidden_size"), fields.whole("num_hidden_layers"), fields.whole("vocab_size")
    inner, is_tied = fields.whole("intermediate_size"), fields.flag("tie_word_embeddings", default=False)
    has_bias = fields.flag("attention_bias", default=True)
    attention = _linear(h, 3 * h, has_bias=has_bias) + _linear(h, h, has_bias=has_bias)
    mlp = _linear(h, inner, has_bias=True) + _linear(inner, h, has_bias=True)
    layer = PlannedUnit((h, h, h, h, *attention, *mlp), layers, is_layer=True)
    return ModelShape(
        units=_units((vocabulary * h,), layer, (h, h), () if is_tied else (vocabulary * h,)),
        num_layers=layers,
        hidden=h,
        positions=fields.whole("max_position_embeddings"),
        read=f"gpt_neox: MLP of 2 x {inner}, {_tied(is_tied=is_tied)}",
    )


def _llama(fields: _Fields) -> ModelShape:
    """All that descend from it."""
    family, h, layers = fields.family, fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    vocabulary, inner, heads = (fields.whole(n) for n in ("vocab_size", "intermediate_size", "num_attention_heads"))
    kv_heads = fields.whole("num_key_value_heads", heads if family == "llama" else None)  # the first had none
    head_dim = fields.whole("head_dim", None if family == "qwen3" else h // heads)
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
        positions=fields.whole("max_position_embeddings"),
        idle_numel=idle,
        read=f"{family}: {heads} heads of {head_dim}, {kv_heads} of keys and values, {of_mlp}, {tied}",
    )


def _gated_mlp(fields: _Fields, h: int, inner: int) -> tuple[tuple[int, ...], int, str]:
    """Elements of its parameters, how many of them a token does not use, and the words for it."""
    if fields.family != "mixtral":
        has_bias = fields.family == "llama" and fields.flag("mlp_bias", default=False)
        return 2 * _linear(h, inner, has_bias=has_bias) + _linear(inner, h, has_bias=has_bias), 0, f"MLP of 3 x {inner}"
    experts, used = fields.whole("num_local_experts"), fields.whole("num_experts_per_tok")
    if used > experts:
        raise ConfigError(f"a token cannot be sent to {used} of {experts} experts: num_experts_per_tok={used}")
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
"""By model_type: what reads it, and the fields it counts that others do not."""
