"""``zcomm bench`` and ``zcomm probe``: collectives measured, checked and compared with torch.distributed's own.

In:  the command line of ``zcomm bench`` or ``zcomm probe``.
Out: rows in the grammar of nccl-tests; for ``probe`` the table that ``format="auto"`` reads.
Called by: zcomm.cli, and by the scripts in bench/, which share its harness.

    options --> launch (torchrun; emulated nodes) --> ranks --> workloads, torch_calls --> timing --> rows, plot
"""
