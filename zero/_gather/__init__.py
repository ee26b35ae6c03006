"""Gathers stage-3 parameters before they are used, and releases them afterwards.

In:  module and autograd hooks that say what is needed next, and stored shards.
Out: full parameters in pooled buffers, prefetched in the recorded order and released after their last use.
Called by: _runtime. Sends through zcomm's all-gather.
"""
