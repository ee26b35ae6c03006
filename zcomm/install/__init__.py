"""The drop-ins: quantized, hierarchical communication under an unchanged DDP or FSDP2 script.

In:  a DistributedDataParallel or FSDP2 model, a recipe, and overrides by module name.
Out: an Installation that reports what is sent, saves its residuals, and can be uninstalled.
Called by: users, through zcomm.install_ddp and zcomm.install_fsdp2.

choices.py    which formats each parameter gets: recipe, overrides by module name, the size threshold
pieces.py     a flat buffer of many parameters, cut into runs of one format
report.py     what was sent, what it would have been, what was left alone and why
ddp.py        install_ddp; ddp_hook.py holds the function that DDP calls
fsdp2.py      install_fsdp2
"""

from __future__ import annotations

from zcomm.install.ddp import install_ddp
from zcomm.install.fsdp2 import install_fsdp2
from zcomm.install.report import Installation, Report

__all__ = ["Installation", "Report", "install_ddp", "install_fsdp2"]
