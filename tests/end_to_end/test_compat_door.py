"""python -m zero.compat: a DeepSpeed script runs unchanged; names that do not exist say so; nothing else is touched."""

# covers zero/compat/door.py zero/compat/__main__.py zero/compat/comm.py zero/compat/helpers.py
# covers zero/compat/accelerator.py zero/compat/front_ends.py zero/compat/names.py

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "door_script.py"
pytestmark = pytest.mark.timeout(300)


def _run(*arguments: str, **variables: str) -> str:
    """What a Python process prints, both streams; its exit code must be 0."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    printed = _run(
        "-m", "zero.compat", str(SCRIPT), str(tmp_path / "saved"), "--deepspeed_config", str(tmp_path / "ds.json")
    )
    assert "the end 0.19.8+zcomm.zero" in printed
    assert printed.count("gives zcomm-zero's names, and no code of DeepSpeed") == 1
    assert "a line on rank 0" in printed


CLOSED = """
import importlib.metadata, importlib.util, sys
import zero, zero.compat
assert importlib.util.find_spec("deepspeed") is None
try:
    importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    print("closed")
from torch import nn
assert not hasattr(nn.Parameter, "ds_id")
"""

OPEN = """
import importlib, importlib.metadata, importlib.util, sys
import zero.compat
zero.compat.as_deepspeed()
zero.compat.as_deepspeed()
assert importlib.metadata.version("deepspeed") == "0.19.8+zcomm.zero"
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert "deepspeed" in importlib.metadata.packages_distributions()
from packaging.version import parse
assert parse("0.19.8") <= parse(importlib.metadata.version("deepspeed")) < parse("0.19.9")
import deepspeed
for line in sys.argv[1:]:
    try:
        exec(line)
    except (ImportError, AttributeError, NotImplementedError, ValueError) as error:
        print(type(error).__name__, "|", error)
    else:
        print("no error |", line)
for name in ("init_inference", "PipelineModule"):
    assert not isinstance(3, getattr(deepspeed, name))
assert not hasattr(deepspeed, "nonsense")
assert importlib.util.find_spec("deepspeed.nonsense") is importlib.util.find_spec("deepspeed.pipe.nonsense") is None
assert importlib.util.find_spec("deepspeed.comm") is not None
from zero.compat import names
for module, found in names.NAMES.items():  # every listed name is there
    opened = importlib.import_module("deepspeed" + ("." + module if module else ""))
    for target in found.values():
        for name in target.split():
            getattr(opened, name)
            assert name in dir(opened)
from deepspeed.utils import *
assert safe_get_full_fp32_param is not None and RepeatingLoader is not None
from deepspeed.ops.adam import *
assert FusedAdam is deepspeed.ops.adam.FusedAdam
assert importlib.metadata.version("DeepSpeed") == deepspeed.__version__
print("all names")
"""

ABSENT = {
    "from deepspeed import nonsense": "deepspeed.nonsense is not a name that zcomm-zero provides",
    "import deepspeed.nonsense": "deepspeed.nonsense is not a name that zcomm-zero provides",
    "deepspeed.nonsense": "deepspeed.nonsense is not a name that zcomm-zero provides",
    "from deepspeed.pipe import nonsense": "for pipeline parallelism use torch.distributed.pipelining",
    "deepspeed.ops.op_builder.CPUAdamBuilder().load()": "nothing has to be built here",
    "import deepspeed.runtime.pipe.engine": "for pipeline parallelism use torch.distributed.pipelining",
    "import deepspeed.inference.v2": "for inference call initialize() without an optimizer",
    "deepspeed.init_inference(3)": "for inference call initialize() without an optimizer",
    "deepspeed.tp_model_init(model=3)": "for tensor parallelism",
    "deepspeed.pipe.PipelineModule(layers=[])": "for pipeline parallelism use torch.distributed.pipelining",
    "deepspeed.moe.layer.MoE(3)": "mark it by deepspeed.utils.set_z3_leaf_modules",
    "deepspeed.zero.MiCS_Init()": "use deepspeed.zero.Init, and hpZ",
    "deepspeed.profiling.nonsense": "FlopCounterMode",
    "import deepspeed.launcher.launch": "torchrun -m zero.compat",
    "import deepspeed.runtime.fp16.onebit.adam": "set zero_quantized_gradients",
    "from deepspeed.ops.adam import ZenFlowSelectiveAdamW": "zcomm.delayed_update",
    "from deepspeed.checkpoint import DeepSpeedCheckpoint": "read their weights by deepspeed.utils.zero_to_fp32",
    "import deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": "async_op=True",
    "from deepspeed.runtime.rollout import RolloutEngine": "unwrap_model_for_generation",
    "deepspeed.FusedAdam": "use deepspeed.ops.adam.FusedAdam",
    "deepspeed.estimate_zero3_model_states_mem_needs_all_live": "use deepspeed.runtime.zero.stage3.estimate_zero3_",
}


WITHOUT_PYDANTIC = """
import sys, zero.compat
zero.compat.as_deepspeed()
sys.modules["pydantic"] = None
try:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_base_class_without_its_library_says_what_to_install() -> None:
    printed = _run("-c", WITHOUT_PYDANTIC)
    assert "BackendUnavailableError DeepSpeedConfigModel derives from pydantic.BaseModel" in printed
    assert "pip install 'pydantic>=2'" in printed


def test_a_process_that_does_not_ask_has_no_deepspeed() -> None:
    assert "closed" in _run("-c", CLOSED)


def test_names_that_do_not_exist_say_what_to_use() -> None:
    printed = _run("-c", OPEN, *ABSENT).splitlines()
    assert "all names" in printed
    lines = [line for line in printed if " | " in line]
    assert len(lines) == len(ABSENT)
    for line, (code, expected) in zip(lines, ABSENT.items(), strict=True):
        assert expected in line, code
        assert not line.startswith("no error"), code


REAL = """
import sys
import deepspeed
assert deepspeed.IS_REAL
import zero.compat
try:
    zero.compat.as_deepspeed()
except zero.compat.door.StateError as error:
    print(error)
assert deepspeed.IS_REAL
"""


def test_a_real_deepspeed_is_used_or_hidden_never_mixed(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("IS_REAL = True\n")
    metadata = tmp_path / "deepspeed-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.0\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    printed = _run("-c", REAL, PYTHONPATH=path)
    assert "deepspeed has been imported already" in printed
    assert str(package) in printed
    hidden = (
        "import zero.compat, importlib.metadata as m; zero.compat.as_deepspeed(); import deepspeed; "
        "assert not hasattr(deepspeed, 'IS_REAL'); print(m.version('deepspeed'))"
    )
    assert "0.19.8+zcomm.zero" in _run("-c", hidden, PYTHONPATH=path)


def test_a_front_end_that_found_no_deepspeed_is_too_early() -> None:
    pytest.importorskip("accelerate")
    late = (
        "import accelerate, zero.compat\ntry:\n    zero.compat.as_deepspeed()\nexcept Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    printed = _run("-c", late)
    assert "StateError accelerate.accelerator looked for deepspeed when it was imported, and found none" in printed


SPAWNING = """
import sys
import torch.multiprocessing as mp
import deepspeed

def train(rank, folder):
    import importlib.metadata
    assert importlib.metadata.version("deepspeed") == "0.19.8+zcomm.zero"
    deepspeed.init_distributed("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    model = deepspeed.zero.TiledLinear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.world_size == 2
    engine.destroy()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
    print("both ended")
"""

ASKING_FIRST = """
import importlib.metadata, importlib.util, sys
import torch.multiprocessing as mp

def ask(rank):
    assert "deepspeed" not in sys.modules
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.version("deepspeed") == "0.19.8+zcomm.zero"
    from deepspeed.ops.adam import FusedAdam
    from torch import nn
    assert not hasattr(nn.Parameter(), "ds_id") and "ds_id" in vars(nn.Parameter)

if __name__ == "__main__":
    mp.spawn(ask, nprocs=1)
    print("asked")
"""


def test_a_spawned_process_that_asks_the_metadata_first(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING_FIRST)
    assert "asked" in _run("-m", "zero.compat", str(tmp_path / "asking.py"))


def test_processes_that_a_script_spawns_have_the_names_too(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    real = tmp_path / "real" / "deepspeed"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise RuntimeError('the real one')\n")
    path = f"{real.parent}{os.pathsep}{ROOT}"
    printed = _run("-m", "zero.compat", str(tmp_path / "spawning.py"), str(tmp_path), PYTHONPATH=path)
    assert "both ended" in printed


def test_zcomm_env_says_whose_names_they_are() -> None:
    assert "0.19.8+zcomm.zero" in _run("-m", "zero.compat", "-m", "zcomm", "env")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("torch.cuda.set_device(0)", "use deepspeed.get_accelerator().current_device_name()"),
        ("torch.nn.Linear(2, 2).cuda()", "use deepspeed.get_accelerator().current_device_name()"),
        ("deepspeed.init_distributed('nccl')", "leave it out, or give 'gloo'"),
    ],
)
def test_a_script_that_needs_cuda_says_what_to_use(line: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import deepspeed, torch\n{line}\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zero.compat", str(tmp_path / "script.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert remedy in done.stderr.strip().splitlines()[-1]


def test_nothing_to_run_is_a_usage_error() -> None:
    for arguments in ((), ("-m",)):
        done = subprocess.run(
            [sys.executable, "-m", "zero.compat", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 2
        assert "usage: python -m zero.compat" in done.stderr


VERSIONS = """
import sys, zero.compat
zero.compat.as_deepspeed()
for name in sys.argv[1:]:
    try:
        __import__(name)
        print("open:", name)
    except ValueError as error:
        print("refused:", error)
"""


def test_versions_of_front_ends_that_are_not_tested(tmp_path: Path) -> None:
    """Front ends of other versions: stand-ins, in front of what is installed."""
    for name, version in {"transformers": "4.56.9", "trl": "2.0.0", "accelerate": "1.99.1", "peft": "0.1"}.items():
        (tmp_path / f"{name}.py").write_text("")
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    printed = _run("-c", VERSIONS, "transformers", "trl", "accelerate", PYTHONPATH=path)
    for text in ("transformers 4.56.9 (tested: 4.57 to 5.23)", "trl 2.0.0 (tested: 1.16)"):
        assert f"refused: zero.compat cannot serve {text}: install a tested version" in printed
    assert "accelerate 1.99.1 (tested: 1.15) is later than tested" in printed
    assert "open: accelerate" in printed
    assert "peft" not in printed, "it is not imported"
