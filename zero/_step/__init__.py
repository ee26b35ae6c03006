"""The optimizer step: from reduced gradients to new parameters.

In:  reduced gradients, the loss scale, the clipping bound.
Out: an agreement on overflow, unscaled and clipped gradients, updated masters, and the weights that others will gather.
Called by: zero.optimizer.
"""
