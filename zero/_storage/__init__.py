"""Storage tiers: device memory, host memory and files, and the copies between them.

In:  flat tensors (shards of parameters, gradients), and the tier that offload_param or offload_optimizer chose.
Out: tensors on the device when an exchange or an update needs them; files with checksums, read asynchronously.
Called by: _sharding, _activations, _optim, _gather, _checkpoint. Knows neither modules nor optimizers.

    states       masters and moments   read, updated, written sub-group by sub-group         stages 1, 2, 3
    parameters   16- or 32-bit shards  read ahead of the all-gather, in the recorded order   stage 3

Source: "ZeRO-Offload" (arXiv:2101.06840) and "ZeRO-Infinity" (arXiv:2104.07857).
"""
