"""What a parameter is for, and so in how few bits its exchanges may be.

Role        parameters                                                       at least
EXACT       norms, biases, vectors, routers, fewer than 2,048 elements       their own dtype
CAREFUL     embeddings (and a head that is tied to one)                      8 bits
MATRIX      the rest                                                         what is asked for
"""

from __future__ import annotations

import re
from enum import Enum

from torch import nn

__all__ = ["MIN_NUMEL", "Role", "roles_of"]

MIN_NUMEL = 2048
"""With fewer elements a tensor's bytes do not matter."""
ROUTERS = re.compile(r"(^|[._])(router|gate|gating|wg)$")
"""Names of modules that choose experts; ``gate_proj`` is a matrix like others."""


class Role(Enum):
    """Of a parameter."""

    EXACT = "exact"
    CAREFUL = "careful"
    MATRIX = "matrix"


def roles_of(model: nn.Module) -> dict[nn.Parameter, Role]:
    """The role of every parameter, by the module that holds it first, its name and its size; no communication."""
    roles: dict[nn.Parameter, Role] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            role = _role_of(name, own, module, parameter)
            known = roles.get(parameter, role)
            roles[parameter] = role if list(Role).index(role) < list(Role).index(known) else known
    return roles


def _role_of(module_name: str, name: str, module: nn.Module, parameter: nn.Parameter) -> Role:
    is_vector = parameter.dim() <= 1 or name.endswith("bias")
    is_norm = "norm" in type(module).__name__.lower()
    is_router = ROUTERS.search(module_name) or ROUTERS.search(name)
    if is_vector or is_norm or is_router or parameter.numel() < MIN_NUMEL:
        return Role.EXACT
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "embedding" in type(module).__name__.lower():
        return Role.CAREFUL
    return Role.MATRIX
