"""One model under ZeRO: its buckets and the parts that gather, reduce and write back.

In:  a checked model, its layout, settings and a Topology.
Out: a model whose forward and backward communicate as its stage says; the initial shards; written-back updates.
Called by: zero.optimizer, _step, _access and _checkpoint.
"""
