"""Which ranks train together, and how they agree on errors.

In:  torch.distributed's groups, the launcher's environment, an exception or a value that only one rank has.
Out: the data-parallel Topology, model-parallel groups, and one exception that every rank raises alike.
Called by: every other package of zero. Imports only zcomm.
"""
