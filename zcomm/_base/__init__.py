"""What every other package needs and that needs none: environment variables, argument checks, awaitables.

In:  the process's environment, arguments of public calls.
Out: values and one named error for what is wrong with them.
Called by: everything in zcomm.
"""
