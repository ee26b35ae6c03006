"""How parameters are laid out in flat buckets, and how buckets are divided over the ranks.

In:  a model's parameters, the stage, and the number of ranks.
Out: buckets (full buffer, this rank's shard, and a state for each), the pool of full buffers, and the prefetch plan.
Called by: everything above. Pure arithmetic and memory; nothing here communicates.
"""
