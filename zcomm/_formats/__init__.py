"""Wire formats: how the elements of a tensor become bits in a message.

In:  a format's name and options.
Out: message layouts in bytes, and the reference arithmetic (the numerics contract) whose bits every kernel reproduces.
Called by: _kernels, _transport and everything above.
"""
