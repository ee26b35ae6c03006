"""Encoding and decoding on this machine: native (CPU), CUDA, Triton or the PyTorch reference.

In:  tensors and a message layout.
Out: messages, decoded tensors, decoded sums; the same bits from every backend.
Called by: _residuals, _collectives and _stateful, through the dispatch table ``kernels``.
"""
