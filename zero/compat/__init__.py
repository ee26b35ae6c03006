"""Scripts and libraries that import ``deepspeed`` train with this library, unchanged, in processes that ask for it.

    python -m zero.compat script.py ARGS          also: torchrun -m zero.compat script.py, accelerate launch -m ...
    python -m zero.compat -m package ARGS         a module, as python -m does

    import zero.compat
    zero.compat.as_deepspeed()                    in code, before anything else imports deepspeed
    import transformers

Inside such a process ``import deepspeed`` and its submodules give the names of :data:`zero.compat.names.NAMES`, and
``importlib.metadata.version("deepspeed")`` the version whose interface they follow. Nothing is installed under that
name. A real DeepSpeed in the same environment is used by processes that do not ask, and never mixed with this.

In:  the names of DeepSpeed 0.19.8 that scripts and front ends use.
Out: this library's classes and functions, with DeepSpeed's signatures and defaults.
Called by: users; nothing else in the library.

The adapters of this package are the only code that knows of old names: :mod:`zero.compat.engine` adds methods to
:class:`zero.Engine`, :mod:`zero.compat.parameters` the attributes ``ds_*`` to parameters.
"""

from zero.compat.door import as_deepspeed

__all__ = ["as_deepspeed"]
