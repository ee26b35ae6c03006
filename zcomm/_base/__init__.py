"""Helpers without dependencies on other packages: environment variables, argument checks, pending operations.

In:  the process's environment, arguments of public calls.
Out: checked values, or an error that names the argument or variable.
Called by: everything in zcomm.
"""
