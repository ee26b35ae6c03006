"""Small data, tokenizers and models for scripts of other people, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

WORDS = """
the a one each river mountain city garden engine winter summer bird teacher child letter song stone
carries finds builds sees remembers follows under over near against slowly quietly often and but
because while
""".split()  # noqa: SIM905
SPECIAL = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
}
TORCHVISION = '''"""In place of torchvision: the data sets and transforms that a script imports, with made data.

It seeds torch, for scripts that do not.
"""

import torch
from torchvision import datasets, transforms

torch.manual_seed(0)
'''
DATASETS = '''"""CIFAR10 and MNIST of random images, each class around a pattern of its own."""

import torch


class _Images(torch.utils.data.Dataset):
    shape = (32, 32, 3)

    def __init__(self, root=None, train=True, download=False, transform=None):
        generator = torch.Generator().manual_seed(0 if train else 1)
        patterns = torch.rand(10, *self.shape, generator=torch.Generator().manual_seed(2))
        self.targets = torch.randint(0, 10, (640 if train else 64,), generator=generator)
        noise = torch.rand(len(self.targets), *self.shape, generator=generator)
        self.data = (patterns[self.targets] * 0.7 + noise * 0.3).mul(255).byte()
        self.transform = transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image, target = self.data[index].numpy(), int(self.targets[index])
        return (image if self.transform is None else self.transform(image)), target


class CIFAR10(_Images):
    pass


class MNIST(_Images):
    shape = (28, 28, 1)
'''
TRANSFORMS = '''"""Compose, ToTensor and Normalize."""

import torch


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for one in self.transforms:
            image = one(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image).permute(2, 0, 1).float().div(255)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(one).view(-1, 1, 1) for one in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
'''


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of few words: their distribution is learned in a few steps."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(6, 14))).capitalize() + "." for _ in range(count)]


def text_file(folder: Path) -> None:
    """``text.txt``, with a sentence a line."""
    (folder / "text.txt").write_text("\n".join(sentences(400)) + "\n")


def characters(folder: Path) -> None:
    """nanoGPT's data/made: the sentences by their characters."""
    import pickle

    import numpy as np

    text = "\n".join(sentences(400))
    letters = sorted(set(text))
    place = folder / "data" / "made"
    place.mkdir(parents=True)
    ids = np.array([letters.index(one) for one in text], dtype=np.uint16)
    for name in ("train.bin", "val.bin"):
        ids.tofile(place / name)
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def torchvision(folder: Path) -> None:
    """A module of this name for scripts that need a data set of it only: its wheel needs a CUDA build of torch."""
    package = folder / "stand_in" / "torchvision"
    package.mkdir(parents=True)
    for name, text in (("__init__", TORCHVISION), ("datasets", DATASETS), ("transforms", TRANSFORMS)):
        (package / f"{name}.py").write_text(text)


def tokenizer(folder: Path) -> Any:
    """A byte-level BPE of the sentences, saved in ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(SPECIAL.values()), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(sentences(400), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=128, **SPECIAL)
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # by the name that transformers 4 has, too
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return wrapped


def model(folder: Path, kind: str) -> None:
    """A model of some 100 thousand parameters with its tokenizer, in ``folder/kind``."""
    import torch
    import transformers

    place = folder / kind
    words = tokenizer(place)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    size = {"vocab_size": len(words), **ids}
    wide = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **size),
        "llama": lambda: transformers.LlamaConfig(intermediate_size=128, num_key_value_heads=2, **wide, **size),
        "opt": lambda: transformers.OPTConfig(ffn_dim=128, word_embed_proj_dim=64, **wide, **size),
        "bert": lambda: transformers.BertConfig(intermediate_size=128, **wide, **size),
    }
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM if kind != "bert" else transformers.AutoModelForMaskedLM
    built.from_config(configs[kind]()).save_pretrained(place)


def gpt2(folder: Path) -> None:
    model(folder, "gpt2")


def llama(folder: Path) -> None:
    model(folder, "llama")


def gpt2_in_folder(folder: Path) -> None:
    """For a script that splits the model's name at its slash."""
    model(folder / "tiny", "gpt2")


def opt(folder: Path) -> None:
    model(folder, "opt")


def critic(folder: Path) -> None:
    """What DeepSpeed-Chat's step 2 leaves for step 3: a reward model's weights, in pytorch_model.bin."""
    import torch
    import transformers

    place = folder / "critic"
    model(folder / "of", "opt")
    (folder / "of" / "opt").rename(place)
    base = transformers.AutoModel.from_pretrained(place).state_dict()
    (place / "model.safetensors").unlink()
    weights = {f"rwtransformer.{name}": value for name, value in base.items()}
    torch.save({**weights, "v_head.weight": torch.randn(1, 64) / 8}, place / "pytorch_model.bin")


def roberta_tokenizer(folder: Path) -> None:
    """What ``AutoTokenizer.from_pretrained("roberta-base")`` finds in the current folder."""
    tokenizer(folder / "roberta-base")


def _records(place: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def alpaca(folder: Path) -> None:
    """``load_dataset("tatsu-lab/alpaca")``, and the list ``alpaca_data.json``."""
    rows = [
        {"instruction": one, "input": "", "output": two}
        for one, two in zip(sentences(80, 1), sentences(80, 2), strict=True)
    ]
    _records(folder / "tatsu-lab" / "alpaca", {"train.jsonl": rows})
    (folder / "alpaca_data.json").write_text(json.dumps(rows))


def ag_news(folder: Path) -> None:
    """``load_dataset("ag_news")``."""
    _records(folder / "ag_news", {"train.jsonl": [{"text": one, "label": 0} for one in sentences(120)]})


def wikitext(folder: Path) -> None:
    """``load_dataset("wikitext", "wikitext-2-v1")``."""
    place = folder / "wikitext"
    _records(place, {"train.jsonl": [{"text": " ".join(sentences(3, seed)) * 2} for seed in range(100)]})
    (place / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )


def chat_data(folder: Path) -> None:
    """DeepSpeed-Chat's ``local/jsonfile``."""

    def rows(seed: int, count: int) -> list[dict[str, Any]]:
        return [
            {"prompt": f"Human: {ask} Assistant:", "chosen": answer, "rejected": "no no no no"}
            for ask, answer in zip(sentences(count, seed), sentences(count, seed + 1), strict=True)
        ]

    place = next(one for one in folder.parents if one.name == "DeepSpeed-Chat") / "data"
    _records(place, {"train.json": rows(3, 96), "eval.json": rows(5, 16)})


def torchvision_without_operators(folder: Path) -> None:
    """The real torchvision beside a CPU torch: its operators need CUDA's libraries, its import a schema of one."""
    package = folder / "stand_in" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys\nimport torch\n\n"
        'schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"\n'
        'for name in ("nms", "qnms"):\n'
        '    torch.library.define(f"torchvision::{name}", schema)\n'
        "place = __path__[0].rpartition('/')[0]\n"
        "sys.path.remove(place)\n"
        "del sys.modules[__name__]\n"
        "import torchvision\n\n"
        "sys.path.append(place)\n"
    )


def images(folder: Path) -> None:
    """Images of three kinds: ``photos/KIND_N.jpg``, and ``timm_photos/{train,validation}/KIND/N.jpg``."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    patterns = draw.random((3, 64, 64, 3))
    (folder / "photos").mkdir()
    for index in range(120):
        kind = index % 3
        pixels = (patterns[kind] * 0.7 + draw.random((64, 64, 3)) * 0.3) * 255
        image = Image.fromarray(pixels.astype(np.uint8))
        image.save(folder / "photos" / f"kind{kind}_{index}.jpg")
        split = folder / "timm_photos" / ("train" if index < 96 else "validation") / f"kind{kind}"
        split.mkdir(parents=True, exist_ok=True)
        image.save(split / f"{index}.jpg")


def readme_trainer(folder: Path) -> None:
    """``readme.py``: the example of a README that uses a Trainer."""
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    (folder / "readme.py").write_text(next(one for one in blocks if "Trainer(" in one))


def words(folder: Path) -> None:
    """``data/wikitext-2.txt``, of which Lightning's WikiText2 makes its data set."""
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(sentences(1500)) + "\n")


def bert_base_cased(folder: Path) -> None:
    """What ``from_pretrained("bert-base-cased")`` finds in the current folder."""
    model(folder, "bert")
    (folder / "bert").rename(folder / "bert-base-cased")


METRIC = '''"""In place of GLUE's metric, which is downloaded: the accuracy."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(one == two for one, two in zip(predictions, references)) / len(references)}
'''


def mrpc(folder: Path) -> None:
    """``load_dataset("nyu-mll/glue", "mrpc")``, and ``evaluate.load("glue", "mrpc")``."""
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)

    def rows(seed: int, count: int) -> list[dict[str, Any]]:
        first = zip(sentences(count, seed), range(count), strict=True)
        return [
            {
                "sentence1": one,
                "sentence2": "stone " * 4 if index % 2 else "winter " * 4,
                "label": index % 2,
                "idx": index,
            }
            for one, index in first
        ]

    place = folder / "nyu-mll" / "glue"
    _records(place, {"train.jsonl": rows(3, 256), "validation.jsonl": rows(4, 32)})
    (place / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )


def sft(folder: Path) -> None:
    """``load_dataset("FOLDER/sft")`` with a column of text."""
    _records(folder / "sft", {"train.jsonl": [{"text": one} for one in sentences(120)]})
