"""The public collectives: all-gather, reduce-scatter, all-reduce and all-to-all in any wire format.

In:  tensors, a format, and a ProcessGroup (one hop) or a Topology (two hops).
Out: the result in the output tensor; a Work if the call is asynchronous.
Called by: users, through zcomm, and by install and zero.
"""
