"""Kernels that encode, decode and sum messages: native (CPU), CUDA, Triton or the PyTorch reference.

In:  tensors and a message layout.
Out: messages, decoded tensors, decoded sums; the same bits from all kernels.
Called by: _residuals, _collectives and _stateful, through the dispatch table ``kernels``.
"""
