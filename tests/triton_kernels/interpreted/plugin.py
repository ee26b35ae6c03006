"""A pytest plugin for runs in Triton's interpreter: pytest -p tests.triton_kernels.interpreted.plugin.

The interpreter replaces the functions of triton.language again for each call of each function, nine tenths of its
time. Here once is enough, since nothing in such a process compiles. Of what is left, a third was a check of each
integer operation for overflow, whose outcome is looked at in Triton's debug mode alone; of the rest, two fifths were
memory for Python's own stack (:func:`in_a_large_frame`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None:
        """Do nothing: nothing was replaced."""


def in_a_large_frame(call: Callable[[], None]) -> None:
    """Call ``call`` where Python's stack has room for all that it calls.

    From version 3.11 on, CPython allocates its stack in chunks of 16 KiB. Each call across the end of one maps a new
    one, and each return unmaps it: in one run of these tests the interpreter's calls did so 1.3 million times.
    """
    call()


# CPython gives a frame of half a MiB a chunk of the next power of two, whose rest is for the frames above it.
in_a_large_frame.__code__ = in_a_large_frame.__code__.replace(co_stacksize=2**16 + 2**10)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    def call() -> None:
        result = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        assert result is None, "a test that returns something, such as a coroutine, has not run"

    in_a_large_frame(call)
    return True


def pytest_configure(config: pytest.Config) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    assert os.environ.get("ZCOMM_KERNELS") == "triton"
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")  # NumPy's, of NaN and infinities
    # Triton 3.6's
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    original, patched = interpreter._patch_lang, set()

    def patch_once(function: FunctionType) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            original(function)
        return _Nothing()

    interpreter._patch_lang = patch_once
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _remember_dtypes()


def _remember_dtypes() -> None:
    """Cache dtypes: the interpreter rebuilds the table for each lookup."""
    original, known = interpreter._get_np_dtype, {}

    def remembered(kind: Any) -> Any:
        name = "pointer" if kind.scalar.is_ptr() else kind.scalar.name
        if name not in known:
            known[name] = original(kind)
        return known[name]

    interpreter._get_np_dtype = remembered
