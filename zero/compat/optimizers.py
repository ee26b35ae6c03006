"""``deepspeed.ops``: optimizers by DeepSpeed's names, with its signatures."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch

import zero
from zcomm import ConfigError


class _OfBase(ABCMeta):
    """Metaclass of these: an object of their first base class, as a configuration builds, is an instance, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_listed = cls.__module__ == __name__
        return super().__instancecheck__(instance) or (is_listed and isinstance(instance, cls.__mro__[1]))


class DeepSpeedCPUAdam(zero.CPUAdam, metaclass=_OfBase):
    """:class:`zero.CPUAdam`."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, adamw_mode=adamw_mode, fp32_optimizer_states=fp32_optimizer_states,
        )  # fmt: skip


class DeepSpeedCPUAdagrad(zero.CPUAdagrad, metaclass=_OfBase):
    """:class:`zero.CPUAdagrad`."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("Adagrad has no amsgrad: leave it out")
        super().__init__(
            model_params, lr, eps=eps, weight_decay=weight_decay, fp32_optimizer_states=fp32_optimizer_states
        )


class DeepSpeedCPULion(zero.CPULion, metaclass=_OfBase):
    """:class:`zero.CPULion`."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, betas=betas, weight_decay=weight_decay, fp32_optimizer_states=fp32_optimizer_states
        )


class FusedAdam(torch.optim.Adam, metaclass=_OfBase):
    """:class:`torch.optim.AdamW`, or Adam with ``adam_w_mode=False``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError("FusedAdam here is torch's, with bias correction: use DeepSpeedCPUAdam, or leave it out")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class FusedLion(zero.Lion, metaclass=_OfBase):
    """:class:`zero.Lion`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(zero.Lamb, metaclass=_OfBase):
    """:class:`zero.Lamb`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if eps_inside_sqrt or max_grad_norm or amsgrad:
            raise ConfigError(
                "FusedLamb has no eps_inside_sqrt, max_grad_norm or amsgrad: leave them out, and clip by "
                "gradient_clipping"
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction, min_coeff=min_coeff,
            max_coeff=max_coeff,
        )  # fmt: skip
