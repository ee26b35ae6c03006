"""Formats that follow what is measured: :class:`AdaptivePrecision` says how, :class:`Policy` decides, step by step."""

from zcomm.adaptive.ladder import Ladder, gradient_ladder, weight_ladder
from zcomm.adaptive.policy import Policy, Tracked, Verdict
from zcomm.adaptive.roles import Role, roles_of
from zcomm.adaptive.settings import AdaptivePrecision
from zcomm.adaptive.signals import Signals

__all__ = [
    "AdaptivePrecision",
    "Ladder",
    "Policy",
    "Role",
    "Signals",
    "Tracked",
    "Verdict",
    "gradient_ladder",
    "roles_of",
    "weight_ladder",
]
