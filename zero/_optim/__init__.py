"""What updates the masters: torch's optimizers on shards, native CPU optimizers, loss scales, states in files.

In:  this rank's float32 master pieces, their gradients, and the user's optimizer class or JSON section.
Out: updated masters and moments, in device memory, host memory or files; learning-rate schedules.
Called by: _step, _checkpoint and zero.optimizer.
"""
