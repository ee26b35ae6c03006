"""The report on machine code: its counts agree with the disassembly, and it runs on one kernel."""

# covers triton_kernels/arithmetic.py

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
# A tile of four values a thread; a routine that divides; one more message in a loop; the end of the message.
CODE = """
//--------------------- .text.kernel     --------------------------
kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   CALL.REL.NOINC `($__internal_0_$__slowpath) ;
.L_x_1:
        /*0040*/                   IADD3 R4, R4, R5, RZ ;
        /*0050*/                   FADD R4, R4, R5 ;
        /*0060*/              @!P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0080*/                   FADD R4, R4, R8 ;
        /*0090*/               @P3 BRA `(.L_x_2) ;
.L_x_3:
        /*00a0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*00b0*/                   STL.64 [R1], R4 ;
        /*00c0*/               @P4 EXIT ;
        /*00d0*/                   STG.E.U8 desc[UR4][R2.64], RZ ;
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4) ;
        /*0100*/                   NOP ;
"""


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in [name for name in sys.modules if name.startswith("gpu_static")]:
        del sys.modules[name]


def _sass() -> ModuleType:
    return __import__("gpu_static_sass")


def test_the_fast_path_is_counted_and_nothing_else() -> None:
    sass = _sass()
    code = sass.parse_code(CODE)["kernel"]
    assert len(code.instructions) == 16
    assert code.spilled_nbytes == 8
    access = sass.Access(16, 8)
    doubled = {"IADD3": 2}
    path = code.fast_path(access, lambda i: doubled.get(i.name, 1))
    assert path == (9, 10)  # without CALL, the loop, and what follows the exit
    more = code.fast_path(access, lambda i: doubled.get(i.name, 1), num_messages=4, message_nbytes=16)
    assert more == (9 + 3 * 3, 10 + 3 * 3)
    assert code.fast_path(sass.Access(4, 8), lambda _: 1) is None
    assert code.fast_path(access, lambda _: 1, num_messages=4, message_nbytes=32) is None  # no loop loads as much


def test_a_call_of_a_label_is_a_branch() -> None:
    """ptxas compiles a loop to this on sm_80."""
    sass = _sass()
    left = "@!P3 CALL.REL.NOINC `(.L_x_3) ;\n        /*0098*/                   BRA `(.L_x_2) ;"
    code = sass.parse_code(CODE.replace("@P3 BRA `(.L_x_2) ;", left))["kernel"]
    path = code.fast_path(sass.Access(16, 8), lambda _: 1, num_messages=4, message_nbytes=16)
    assert path == (9 + 3 * 4, 9 + 3 * 4)


def test_a_kernel_is_compiled_and_read() -> None:
    pytest.importorskip("triton", reason="Triton compiles it")
    static, kernels = __import__("gpu_static"), __import__("gpu_static_kernels")
    if missing := kernels.missing_tools():
        pytest.skip(f"missing: {missing}")
    tile, warps, kernel = kernels.triton_kernel("quantize", "int8", 90)
    n = tile // (32 * warps)
    row = static.row_of("Triton", "quantize", "int8", 90, "", kernel)
    opcodes = [instruction.name for instruction in kernel.code.instructions]
    assert opcodes.count("LDG") == n // 8  # bfloat16 values, 16 bytes each
    assert opcodes.count("FMUL") >= n  # by the inverse of the scale
    assert row.spilled_nbytes == 0
    assert 3 <= row.instructions <= len(opcodes) / n  # at least: widened, scaled, rounded
    assert row.weight >= row.instructions
    assert row.share >= 0.85
    assert row.nbytes == pytest.approx(2 + 1 + 2 / 256, rel=1e-3)


def test_without_tools_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="Triton compiles it")
    static = __import__("gpu_static")
    monkeypatch.setattr(static, "missing_tools", lambda: ["nvdisasm"])
    assert static.main([]) == 1
    assert "nvdisasm missing" in capsys.readouterr().err
