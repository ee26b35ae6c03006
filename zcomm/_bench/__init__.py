"""``zcomm bench`` and ``zcomm probe``: time the collectives, check their results, compare with torch.distributed.

In:  the command line of ``zcomm bench`` or ``zcomm probe``.
Out: rows in the grammar of nccl-tests; for ``probe`` the table that ``format="auto"`` reads.
Called by: zcomm.cli, and the scripts in bench/, which share its harness.

    options --> launch (torchrun; emulated nodes) --> ranks --> workloads, torch_calls --> harness --> rows, plot
"""
