"""The contenders of the comparisons: this library and its peers train one model behind the same interface.

Each module imports its own library, and no other module imports it: a process that measures memory loads only one.
"""
