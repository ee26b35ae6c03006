"""Lays parameters out in flat buckets, and partitions buckets into one shard for each rank.

In:  a model's parameters, the stage, and the number of ranks.
Out: buckets (full buffer, this rank's shard, and a state for each), the pool of full buffers, and the prefetch plan.
Called by: all packages above. Arithmetic and memory only; nothing here communicates.
"""
