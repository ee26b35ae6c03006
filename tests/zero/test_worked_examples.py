"""The worked examples of CONTRIBUTING.md, replayed in a copy of the repository."""

# covers zero/_modes/__init__.py zero/_config/keys.py zero/_config/json_schema.py
# covers zcomm/_formats/formats.py zcomm/_formats/blocks.py

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.mutants.run import ROOT, Copy

KEY = """
import json
from zcomm import ConfigError, Topology
from zero import ZeroOptimizer, ZeroSettings
from zero._config import explain, json_schema, markdown_table, read_source
from zero._config.settings import resolve

assert resolve(ZeroSettings(stage=3, min_shard_numel=10**9), Topology.single()).limits.live_numel == 10**9
assert resolve(ZeroSettings(stage=3), Topology.single()).adjusted == ()
for refused in (0, "many"):
    for use in (
        lambda: ZeroSettings(min_shard_numel=refused), lambda: read_source({"zcomm": {"min_shard_numel": refused}}),
    ):
        try:
            use()
        except ConfigError as error:
            assert "min_shard_numel must be" in str(error), error
        else:
            raise AssertionError(refused)
try:
    read_source({"zcomm": {"min_shard_numle": 1}})
except ConfigError as error:
    assert "did you mean 'min_shard_numel'" in str(error), error
assert json_schema()["properties"]["zcomm"]["properties"]["min_shard_numel"]["default"] == 2048
assert "| `zcomm.min_shard_numel` | 2048 | the least elements" in markdown_table()
text = explain(read_source({"zero_optimization": {"stage": 2}, "zcomm": {"min_shard_numel": 4096}}), shows_all=True)
assert "zcomm.min_shard_numel" in text and "inactive: stage is below 3" in text, text
print("replayed")
"""


FORMAT = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import zcomm
from zcomm._bench.error_bounds import step_bound
from zcomm._formats.message import layout_of
from zcomm._kernels import kernels
from zcomm.errors import BackendUnavailableError

NUMEL = 1000


def drawn(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def rounded_up(value):
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32).item()
    return torch.tensor((bits + 0xFFFF) & -0x10000, dtype=torch.int32).view(torch.float32)


def expected(x):
    levels = [sign * level for level in (0.0, *(2.0**i for i in range(7))) for sign in (1, -1)]
    values = []
    for block in x.split(64):
        scale = rounded_up((block.abs().max() / 64).item())
        for y in (block * (1 / scale)).tolist():
            values.append(min(levels, key=lambda level: (abs(level - y), abs(level))) * scale)
    return torch.stack(values)


def alone(x, kernels_wanted="auto"):
    layout = layout_of("test", zcomm.get_format("log4"), x.dtype, 1, x.numel(), kernels_wanted)
    message, decoded = layout.new(1, x.device), torch.empty_like(x)
    kernels.quantize(x, layout, message, 0, 0)
    kernels.decode(message, layout, decoded, 0, 0)
    return decoded


rank, store = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    x = drawn(0)
    assert torch.equal(alone(x), expected(x))
    assert ((alone(x) - x).abs().double() <= step_bound(x.abs().double(), zcomm.get_format("log4"), x.dtype)).all()
    assert str(zcomm.get_format("log4/32:hadamard")) == "log4/32:hadamard"
    assert 0.05 < zcomm.relative_error(x, "log4") < 0.3
    assert alone(torch.tensor([1.0, float("inf")])).isnan().all() and not alone(torch.zeros(2)).any()
    for wanted in ("native", "triton"):
        try:
            alone(x, wanted)
        except BackendUnavailableError as error:
            assert f"kernels='{wanted}'" in str(error) and "log4" in str(error), error
        else:
            raise AssertionError(wanted)
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world_size=2, rank=rank)
parts = [alone(drawn(r)) for r in range(2)]
gathered, total = torch.empty(2 * NUMEL), torch.empty(NUMEL)
with zcomm.traffic() as counted:
    zcomm.all_gather_single(gathered, drawn(rank), format="log4")
nbytes = 32 + 500 + 8 + 4  # 16 scales, codes, a trailer, up to a multiple of 16
assert counted.bytes() == sum(zcomm.volume.one_hop_sent(NUMEL, torch.float32, 1, 0, "log4")) == nbytes
assert torch.equal(gathered, torch.cat(parts))
source = torch.cat([drawn(rank)] * 2)
zcomm.reduce_scatter_single(total, source, format="log4")
assert torch.equal(total, parts[0] + parts[1])
dist.destroy_process_group()
print("replayed")
"""


MODE = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import zcomm
import zero
from torch import nn
from zero._config import resolve_config
from zero.plan import Model
from zero.plan.exchanges import Exchanges, step_moved

WIDTH, NUM_MICRO = 64, 2


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).bfloat16()


def trained(**options):
    model = layers()
    options |= {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    options |= {"gradient_accumulation_steps": NUM_MICRO}
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, **options)
    for _ in range(3):
        with zcomm.traffic() as traffic:
            for _ in range(NUM_MICRO):
                x = torch.ones(1, WIDTH, dtype=torch.bfloat16) * (1 + dist.get_rank())
                model(x).float().square().sum().backward()
            kept = optimizer.memory().buffers["secondary partition"]
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.memory().buffers["secondary partition"] == 0  # the parameters have changed
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    settings = resolve_config(None, options | {"stage": 3}).settings
    planned = step_moved(
        Model.of_module(layers(), num_layers=3, hidden=WIDTH), Exchanges.of(settings, 1, 2, torch.bfloat16), NUM_MICRO
    )
    sent = traffic.bytes() - traffic.bytes(operation="control")
    assert sent == sum(moved.sent.intra for kind, moved in planned.items() if kind != "agreements"), traffic
    estimated = zero.estimate(layers(), options_json(options), 1, 2, prints=False).usage()
    assert sum(one.nbytes for one in estimated if one.kind == "secondary partition") == kept, estimated
    return values, sent, kept


def options_json(options):
    return {"zero_optimization": {"stage": 3}, "zcomm": {"mode": options.get("mode")}, "bf16": {"enabled": True}}


rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world_size=2, rank=rank)
plain, sent, kept = trained()
with_copy, fewer, numel = trained(mode="own_copy")
assert plain.keys() == with_copy.keys() and all(torch.equal(plain[name], with_copy[name]) for name in plain)
assert kept == 0 and numel >= 2 * 3 * (WIDTH * WIDTH + WIDTH) and 0 < fewer < sent
for options, text in (({"stage": 2}, "needs stage 3"), ({"stage": 3, "mode": "own_cpy"}, "own_copy")):
    try:
        zero.ZeroOptimizer(layers(), torch.optim.SGD, lr=0.1, **({"mode": "own_copy"} | options))
    except zcomm.ConfigError as error:
        assert text in str(error), error
    else:
        raise AssertionError(options)
dist.destroy_process_group()
print("replayed")
"""


def _apply(example: str, folder: Path) -> list[str]:
    """Apply the diff of ``example`` to the copy in ``folder``; returns the files that it changes."""
    pattern = rf"<!-- example: {example} -->\n```diff\n(.*?)```"
    (patch,) = re.findall(pattern, (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    files = []
    for part in re.split(r"^--- .*\n", patch, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@\n", part.removeprefix("+++ b/"), flags=re.MULTILINE)
        files.append(name.strip())
        path = folder / files[-1]
        text = path.read_text() if path.exists() else ""
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in keeps) for keeps in (" -", " +"))
            assert not old or text.count(old) == 1, f"{files[-1]}: {text.count(old)} times:\n{old}"
            text = text.replace(old, new) if old else new
        path.write_text(text)
    return files


# An editable install has a finder that would find the repository instead of the copy.
IN_COPY = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
"""


def _start(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "ZCOMM_KERNELS": "auto"}
    words = [sys.executable, "-c", IN_COPY + script, *arguments]
    return subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _end(started: list[subprocess.Popen[str]]) -> None:
    """Wait until all have printed that they are done; end those that are late."""
    try:
        for process in started:
            output, errors = process.communicate(timeout=120)
            assert output.endswith("replayed\n"), errors
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_key_is_one_line_and_its_use(tmp_path: Path) -> None:
    Copy(tmp_path)
    assert _apply("key", tmp_path) == ["zero/_config/setting_keys.py", "zero/_config/settings.py"]
    _end([_start(KEY, tmp_path)])


def test_a_format_is_one_declaration_and_its_file(tmp_path: Path) -> None:
    """It has no native, Triton or CUDA kernels: the reference serves it, alone and between two ranks over gloo."""
    Copy(tmp_path)
    changed = _apply("format", tmp_path)
    assert [file for file in changed if (ROOT / file).exists()] == ["zcomm/_formats/formats.py"]
    _end([_start(FORMAT, tmp_path, str(rank), str(tmp_path / "store")) for rank in range(2)])


def test_a_mode_is_one_file_a_name_and_a_line(tmp_path: Path) -> None:
    """It trains with the bits of the stage alone, and plan and estimate know what it sends and keeps."""
    Copy(tmp_path)
    changed = _apply("mode", tmp_path)
    assert [file for file in changed if (ROOT / file).exists()] == [
        "zero/_modes/__init__.py", "zero/_config/setting_keys.py",
    ]  # fmt: skip
    _end([_start(MODE, tmp_path, str(rank), str(tmp_path / "store")) for rank in range(2)])
