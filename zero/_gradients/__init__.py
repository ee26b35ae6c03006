"""Reduces gradients: from autograd's ``.grad`` to the shard that each rank updates.

In:  gradients that autograd writes into a bucket's buffer, one bucket at a time, during backward.
Out: the average over the ranks, summed over micro-batches, on the rank that owns the shard (or on all, at stage 0).
Called by: the hooks of _gather and by _runtime. Sends through zcomm's reduce-scatter.
"""
