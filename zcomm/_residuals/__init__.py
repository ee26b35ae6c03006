"""Error feedback: what an encoding lost, kept by parameter and added back at the next exchange.

In:  the difference between what was to be sent and what its message holds.
Out: int8 residuals, moved with their parameters to other layouts, and rescaled with the loss scale.
Called by: _collectives, _stateful, install and zero.
"""
