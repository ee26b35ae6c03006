"""Sending bytes between ranks: process groups, exchanges over torch.distributed or NCCL, and the deadlock watch.

In:  messages (byte tensors) and a ProcessGroup or a Topology.
Out: the other ranks' messages; counts of what was sent; a CommunicationError or DivergedError, the same on every rank.
Called by: _collectives and _stateful. The only package that calls torch.distributed's collectives.
"""
