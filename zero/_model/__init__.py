"""A model before training: zero.Init, materialization from meta, casts, checks, division into units and buckets.

In:  an nn.Module, or the code that builds one under zero.Init.
Out: the layout (units and buckets), the same on every rank; parameters with their identity kept.
Called by: zero.initialize, zero.optimizer, _runtime and _access.
"""
