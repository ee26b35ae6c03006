"""Where the shards of a model rest between uses: in device memory, in host memory, or in files.

    states       masters and moments   read, updated, written sub-group by sub-group         stages 1, 2, 3
    parameters   16- or 32-bit shards  read ahead of the all-gather, in the recorded order   stage 3

Source: "ZeRO-Offload" (arXiv:2101.06840) and "ZeRO-Infinity" (arXiv:2104.07857).
"""
