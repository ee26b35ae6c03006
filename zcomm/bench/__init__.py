"""``zcomm bench`` and ``zcomm probe``: collectives measured, checked and compared with torch.distributed's own.

    options --> launch (torchrun; emulated nodes) --> ranks --> workloads, torch_calls --> timing --> rows, plot

Nothing else of the library imports this package; only the command line does, when it is asked to.
"""
