"""``deepspeed.ops.op_builder``: which of DeepSpeed's compiled operators have their like here. Nothing is built.

Only that of files can be loaded.
"""

from __future__ import annotations

from typing import Any, ClassVar

from zero._config import NotAvailableError
from zero.compat import file_io


class OpBuilder:
    """An operator of DeepSpeed's."""

    NAME: ClassVar[str] = ""
    available: ClassVar[bool] = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether this library has what uses the operator."""
        return self.available

    def load(self, verbose: bool = True) -> Any:
        """Raise: there is no such extension module, and what uses it needs none.

        Raises:
            NotAvailableError: Always.
        """
        raise NotAvailableError(
            f"{type(self).__name__}.load(): nothing has to be built here: CPU optimizers and kernels are part of "
            "zcomm-zero"
        )


def _builder(class_name: str, name: str, *, available: bool) -> type[OpBuilder]:
    return type(class_name, (OpBuilder,), {"NAME": name, "available": available, "__doc__": f"``{name}``."})


CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", available=True)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", available=True)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", available=True)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", available=True)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", available=True)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", available=True)


class AsyncIOBuilder(OpBuilder):
    """``async_io``."""

    NAME, available = "async_io", True

    def load(self, verbose: bool = True) -> Any:
        """What has :class:`zero.compat.file_io.aio_handle`."""
        return file_io


QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", available=False)
UtilsBuilder = _builder("UtilsBuilder", "utils", available=False)
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn", available=False)
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer", available=False)
GDSBuilder = _builder("GDSBuilder", "gds", available=False)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", available=False)
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory", available=False)
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd", available=False)
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn", available=False)
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference", available=False)
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer", available=False)
TransformerBuilder = _builder("TransformerBuilder", "transformer", available=False)

ALL_OPS: dict[str, type[OpBuilder]] = {builder.NAME: builder for builder in OpBuilder.__subclasses__()}
"""By name."""

__compatible_ops__: dict[str, bool] = {name: builder.available for name, builder in ALL_OPS.items()}
