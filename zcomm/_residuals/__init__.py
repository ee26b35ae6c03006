"""Error feedback: what an encoding loses is kept by parameter and added at the next exchange.

In:  the difference between the values to be sent and the decoded message.
Out: int8 residuals, which move with their parameters to other layouts and are rescaled with the loss scale.
Called by: _collectives, _stateful, install and zero.
"""
