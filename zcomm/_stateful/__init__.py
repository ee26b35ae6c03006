"""Exchanges that keep something from one call to the next.

In:  shards and gradients of one training, step after step.
Out: delta gathers, node sums over micro-batches, node replicas, secondary partitions, shards kept encoded.
Called by: users, through zcomm, and by zero's modes.
"""
