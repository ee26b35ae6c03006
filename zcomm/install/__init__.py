"""install_ddp and install_fsdp2: quantized, hierarchical communication under an unchanged DDP or FSDP2 script.

In:  a DistributedDataParallel or FSDP2 model, a recipe, and overrides by module name.
Out: an Installation that reports what is sent, saves its residuals, and can be uninstalled.
Called by: users, through zcomm.install_ddp and zcomm.install_fsdp2.

agreement.py        the ranks compare their settings and errors before anything is installed
choices.py          which formats each parameter gets: recipe, overrides by module name, the size threshold
pieces.py           a flat buffer of many parameters in pieces of one format each, with byte counts and residuals
carried_state.py    the state that goes from step to step and into checkpoints: residuals, random numbers
report.py           bytes sent, bytes without compression, what stays uncompressed and why
ddp.py              install_ddp; ddp_hook.py holds the function that DDP calls
fsdp2.py            install_fsdp2; fsdp2_comms.py holds the objects that FSDP2 calls, fsdp2_units.py reads its state
"""

from __future__ import annotations

from zcomm.install.ddp import install_ddp
from zcomm.install.fsdp2 import install_fsdp2
from zcomm.install.report import Installation, Report

__all__ = ["Installation", "Report", "install_ddp", "install_fsdp2"]
