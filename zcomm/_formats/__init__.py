"""Wire formats: how the elements of a tensor are encoded in a message.

In:  a format's name and options.
Out: message layouts in bytes, and the reference implementation (the numerics contract) that every kernel reproduces.
Called by: _kernels, _transport and everything above.
"""
