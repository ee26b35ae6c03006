"""When the Triton kernels are chosen, what is said when they cannot be, and how a launch is tuned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zcomm import blocks, on_triton
from zcomm.errors import BackendUnavailableError
from zcomm.formats import FORMATS
from zcomm.message import layout_of
from zcomm.triton_kernels import _run, codecs, kernels, launch, unavailable_reason

ROOT = Path(__file__).parents[2]


def _run_python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_triton.env, "value", lambda name: "triton" if name == "ZCOMM_KERNELS" else "0")
    on_triton._is_chosen.cache_clear()
    layout = layout_of("test", FORMATS["int8"], torch.float32, 1, 10)
    with pytest.raises(BackendUnavailableError, match="TRITON_INTERPRET=1"):
        on_triton.serves(torch.empty(10), layout)
    on_triton._is_chosen.cache_clear()


@pytest.mark.parametrize("setting", ["auto", "native", "reference"])
def test_cpu_tensors_are_served_by_others(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_triton.env, "value", lambda _: setting)
    assert on_triton.unavailable_reason("cpu") == f"ZCOMM_KERNELS={setting}"
    assert on_triton.unavailable_reason("cuda") == ("ZCOMM_KERNELS=reference" if setting == "reference" else "")


def test_without_triton_the_reason_names_the_remedy() -> None:
    hidden = "import sys; sys.modules['triton'] = None; import importlib.util as u; find = u.find_spec; "
    hidden += "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a); "
    done = _run_python(hidden + "from zcomm import on_triton; print(on_triton.unavailable_reason('cuda'))")
    assert done.stdout == "Triton is not installed: pip install 'zcomm-zero[triton]'\n", done.stderr
    assert unavailable_reason("xpu") == "there are none for xpu tensors"


def test_importing_zcomm_does_not_import_triton() -> None:
    done = _run_python("import sys, zcomm; print('triton' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_nf4_has_the_same_levels() -> None:
    assert codecs.NF4_LEVELS == blocks.NF4_LEVELS


def test_a_tuned_launch_passes_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked: of the configurations, the widest is said to be the fastest."""
    taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(kernels.quantize_kernel, "run", lambda *args, **options: taken.append((args, options)))
    monkeypatch.setattr(_run, "_is_tuned", lambda *_: True)
    layout = layout_of("test", FORMATS["int8"], torch.float32, 1, 1 << 20)
    x = torch.zeros(1 << 20)

    def tuned(*arguments: Any) -> Any:
        tuner = _run.tuner_of(*arguments)
        monkeypatch.setattr(tuner, "_bench", lambda *_, config, **__: [10_000 - config.kwargs["TILE"]] * 3)
        return tuner

    monkeypatch.setattr(_run, "_tuned", tuned)
    launch.quantize(x, layout, layout.new(1, x.device), 0, 0)
    ((arguments, options),) = taken
    assert len(arguments) + len([o for o in options if o in kernels.quantize_kernel.arg_names]) == len(
        kernels.quantize_kernel.arg_names
    )
    assert options["TILE"] == max(_run.TILES)
    assert options["enable_fp_fusion"] is False
    assert options["grid"](options) == ((1 << 20) // max(_run.TILES),)
