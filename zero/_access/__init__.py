"""Access to sharded parameters: gathered parameters, state dicts, single values, pretrained weights, TiledLinear.

In:  modules or parameters of a model under ZeRO, or plain weights to load.
Out: full tensors (GatheredParameters, state_dict, safe_get_*), or changed shards and masters.
Called by: users, through zero and zero.utils; and by _checkpoint.
"""
