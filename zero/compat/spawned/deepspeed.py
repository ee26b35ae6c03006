"""Opens the door in a process that multiprocessing has spawned from one in which it is open.

Such a process inherits ``sys.path`` and nothing else; :func:`zero.compat.as_deepspeed` puts this folder there.
"""

import importlib
import sys

from zero.compat.door import as_deepspeed

del sys.modules[__name__]
as_deepspeed()
importlib.import_module(__name__)
