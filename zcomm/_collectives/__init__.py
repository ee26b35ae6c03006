"""The public collectives: all-gather, reduce-scatter, all-reduce and all-to-all in any wire format.

In:  tensors, a format, and a ProcessGroup (one hop) or a Topology (two hops).
Out: what torch.distributed's function of the same name returns, or a Work for it.
Called by: users, through zcomm, and by install and zero.
"""
