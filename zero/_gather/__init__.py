"""The way of a stage-3 parameter: gathered before it is used, released after.

In:  module and autograd hooks that say what is needed next, and shards at rest.
Out: full parameters in pooled buffers, prefetched by the recorded order; released buffers when their last use is over.
Called by: _runtime. Sends through zcomm's all-gather.
"""
