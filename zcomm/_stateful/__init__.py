"""Collectives that keep state from one call to the next.

In:  shards and gradients of a training run, step after step.
Out: delta gathers, node sums over micro-batches, node replicas, secondary partitions, encoded shards.
Called by: users, through zcomm, and by zero's modes.
"""
