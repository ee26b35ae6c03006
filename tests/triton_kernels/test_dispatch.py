"""When the Triton kernels are selected, the error when they cannot be, and how a launch is tuned."""

# covers triton_kernels/_kept.py triton_kernels/_run.py triton_kernels/kernels.py zcomm/_kernels/on_triton.py

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_python
from zcomm._formats import codec_nf4
from zcomm._formats.formats import FORMATS, get_format
from zcomm._formats.message import layout_of
from zcomm._kernels import on_triton
from zcomm.errors import BackendUnavailableError
from zcomm.triton_kernels import _run, codecs, kernels, launch, unavailable_reason


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
    done = run_python(hidden + "from zcomm._kernels import on_triton; print(on_triton.unavailable_reason('cuda'))")
    assert done.stdout == "Triton is not installed: pip install 'zcomm-zero[triton]'\n", done.stderr
    assert unavailable_reason("xpu") == "there are none for xpu tensors"


def test_importing_zcomm_does_not_import_triton() -> None:
    done = run_python("import sys, zcomm; print('triton' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_nf4_has_the_same_levels() -> None:
    assert codecs.NF4_LEVELS == codec_nf4.LEVELS


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of tuned choices, initially empty; no choice is in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _run._kept.cache_clear()
    yield tmp_path / "zcomm_tuned"
    _run._kept.cache_clear()


class Tuning:
    """Tunes launches without a GPU: the widest configuration counts as the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiles: list[int] = []
        self.num_measured = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(kernels.quantize_kernel, "run", lambda *_, **options: self.tiles.append(options["TILE"]))
        monkeypatch.setattr(_run, "_is_tuned", lambda *_: True)
        monkeypatch.setattr(_run, "_tuned", self._tuned)

    def _tuned(self, *arguments: Any) -> Any:
        tuner = _run.tuner_of(*arguments)
        self._monkeypatch.setattr(tuner, "_bench", self._measure)
        return tuner

    def _measure(self, *_: Any, config: Any, **__: Any) -> list[int]:
        self.num_measured += 1
        return [10_000 - config.kwargs["TILE"]] * 3

    def launch(self, format: str = "int8") -> int:
        layout = layout_of("test", FORMATS[format], torch.float32, 1, 1 << 20)
        x = torch.zeros(1 << 20)
        launch.quantize(x, layout, layout.new(1, x.device), 0, 0)
        return self.tiles[-1]


def _forget() -> None:
    """Forget the tuned choices, as in a new process."""
    _run._kept.cache_clear()


WIDEST = max(tile for tile, _ in _run.CANDIDATES)


def test_the_next_process_does_not_measure_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = Tuning(monkeypatch)
    assert [tuning.launch(), tuning.launch()] == [WIDEST, WIDEST]
    assert tuning.num_measured == len(_run.CANDIDATES)
    _forget()
    assert tuning.launch() == WIDEST
    assert tuning.num_measured == len(_run.CANDIDATES)
    tuning.launch("int4")
    assert tuning.num_measured == 2 * len(_run.CANDIDATES)
    assert len(list(kept.glob("*.json"))) == 2
    assert not list(kept.glob(".new-*"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"of": "another", "tile": 1024, "warps": 4}', "12345", "[1024]"]
)
def test_a_damaged_or_foreign_file_is_measured_again(content: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = Tuning(monkeypatch)
    tuning.launch()
    (path,) = kept.glob("*.json")
    whole = path.read_text()
    in_place = content in ("12345", "[1024]")  # of a file that is right otherwise
    path.write_text(whole.replace(f'"tile": {WIDEST}', f'"tile": {content}') if in_place else content)
    _forget()
    assert tuning.launch() == WIDEST
    assert tuning.num_measured == 2 * len(_run.CANDIDATES)
    assert path.read_text() == whole


def test_another_gpu_has_its_own_choices(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = _run._description
    tuning = Tuning(monkeypatch)
    tuning.launch()
    monkeypatch.setattr(_run, "_description", lambda *arguments: described(*arguments) + "another")
    _forget()
    tuning.launch()
    assert len(list(kept.glob("*.json"))) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    _forget()
    tuning = Tuning(monkeypatch)
    assert [tuning.launch(), tuning.launch()] == [WIDEST, WIDEST]
    assert tuning.num_measured == len(_run.CANDIDATES)
    _forget()


def test_nothing_is_measured_inside_a_capture(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = Tuning(monkeypatch)
    with monkeypatch.context() as captured:
        captured.setattr(_run, "_is_capturing", lambda: True)
        assert tuning.launch() == 2048
        assert tuning.num_measured == 0
    tuning.launch()
    monkeypatch.setattr(_run, "_is_capturing", lambda: True)
    assert tuning.launch() == WIDEST  # known, and used there


@pytest.mark.usefixtures("kept")
def test_a_tuned_launch_passes_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the widest configuration counts as the fastest."""
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
    assert options["TILE"] == max(tile for tile, _ in _run.CANDIDATES)
    assert options["enable_fp_fusion"] is False
    assert options["grid"](options) == ((1 << 20) // options["TILE"],)


def test_a_sum_that_takes_two_launches_goes_on_in_float32_with_a_flag_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 48 and of 256 elements have no tile in common."""
    taken = list[tuple[Any, tuple[Any, ...]]]()
    monkeypatch.setattr(launch, "run", lambda kernel, arguments, *_, **__: taken.append((kernel, arguments)))
    received = layout_of("test", get_format("int8/48"), torch.float32, 2, 1000)
    sent = layout_of("test", get_format("int8/256"), torch.float32, 1, 1000)
    messages, out = (layout.new(2, torch.device("cpu")) for layout in (received, sent))
    launch.decode_sum_requantize(messages, received, out, sent, is_valid=torch.ones(1, dtype=torch.int32))
    assert [kernel for kernel, _ in taken] == [kernels.decode_sum_kernel, kernels.quantize_kernel]
    summing, encoding = (dict(zip(kernel.arg_names, arguments, strict=False)) for kernel, arguments in taken)
    total, refused = summing["out_ptr"], summing["refused_ptr"]
    assert (total.dtype, total.numel()) == (torch.float32, 2 * 1000)
    assert (refused.dtype, refused.numel()) == (torch.int32, 1)
    assert not total.data_ptr() <= refused.data_ptr() < total.data_ptr() + total.nbytes
    assert encoding["x_ptr"].data_ptr() == total.data_ptr()
    assert encoding["refused_ptr"].data_ptr() == refused.data_ptr()
