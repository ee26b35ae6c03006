"""Whether kernels have the codecs of a call. Those that lack one leave the call to the PyTorch reference."""

from __future__ import annotations

from collections.abc import Collection

import torch

from zcomm._base import env
from zcomm._formats.message import MessageLayout
from zcomm.errors import BackendUnavailableError


def have_codecs(known: Collection[str], layouts: tuple[MessageLayout, ...], *settings: str) -> bool:
    """Whether kernels for the codecs of these names serve ``layouts``.

    Raises:
        BackendUnavailableError: They lack a codec, but ZCOMM_KERNELS or ``kernels=`` asks for them by one of
            ``settings``. float64 is left to the reference in any case.
    """
    for layout in layouts:
        if layout.codec.name not in known:
            setting, chosen_by = env.kernels(layouts[0].kernels)
            if setting in settings and layout.codec.dtype != torch.float64:
                raise BackendUnavailableError(
                    f"{chosen_by}, but these kernels do not have the codec {layout.codec.name}: with 'auto' the "
                    "PyTorch reference serves it"
                )
            return False
    return True
