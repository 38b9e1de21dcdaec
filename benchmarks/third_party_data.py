"""Write tiny data sets and models for the scripts of third_party_scripts.py.

The values are random but learnable, and the same in each call. Sizes make a script run for 20 to 60
seconds. Models have random weights.
"""

from __future__ import annotations

import csv
import json
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_VOCABULARY, _LINES = 1500, 9000
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_UNET = {
    "_class_name": "UNet2DModel",
    "_diffusers_version": "0.30.0",
    "sample_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
}
_MRPC = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.csv
  - split: validation
    path: mrpc/validation.csv
  - split: test
    path: mrpc/test.csv
dataset_info:
- config_name: mrpc
  features:
  - name: sentence1
    dtype: string
  - name: sentence2
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': not_equivalent
          '1': equivalent
  - name: idx
    dtype: int32
---
"""

# CIFAR-10's files are recognized by their checksums, which other images do not have.
_WITHOUT_CHECKSUMS = """import torchvision.datasets.cifar
torchvision.datasets.cifar.check_integrity = lambda path, md5: True
"""
# The example of the repository's README, with a smaller model and fewer steps.
_DENOISING_DIFFUSION = """import sys

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

if __name__ == "__main__":
    model = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    diffusion = GaussianDiffusion(model, image_size=32, timesteps=40)
    trainer = Trainer(
        diffusion,
        sys.argv[1],
        train_batch_size=8,
        train_lr=8e-5,
        train_num_steps=80,
        gradient_accumulate_every=2,
        ema_decay=0.995,
        save_and_sample_every=20,
        num_samples=4,
        calculate_fid=False,
    )
    trainer.train()
"""


def write_data(folder: Path) -> None:
    """Write all data sets and models, once."""
    if (folder / "done").exists():
        return
    draw = np.random.default_rng(0)
    for name, train, test in (("", 3840, 640), ("small", 960, 100), ("whole", 60000, 640)):
        _write_mnist(folder / name / "MNIST" / "raw", draw, train, test)
    _write_images(folder, draw)
    lines = _make_lines(draw)
    _write_texts(folder, lines)
    shards = folder / "TinyStories_all_data"
    shards.mkdir(parents=True)
    for shard in range(3):
        tokens = draw.integers(2, 512, 200_000).astype(np.uint16)
        tokens[::200] = 1
        tokens.tofile(shards / f"data0{shard}.bin")
    _write_hugging_face_data(folder / "hugging_face", draw, lines)
    _write_models(folder / "hugging_face", lines)
    _write_cifar(folder / "cifar-10-batches-py", draw)
    _write_planetoid(folder / "planetoid" / "Cora" / "raw", draw)
    _write(folder / "patches" / "sitecustomize.py", _WITHOUT_CHECKSUMS)
    _write(folder / "scripts" / "denoising_diffusion.py", _DENOISING_DIFFUSION)
    (folder / "done").touch()


def _write_mnist(folder: Path, draw: np.random.Generator, train: int, test: int) -> None:
    """Write images with a bright bar, whose place is the class, in MNIST's format."""
    folder.mkdir(parents=True)
    for kind, count in (("train", train), ("t10k", test)):
        labels = draw.integers(0, 10, count)
        images = draw.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for label in range(10):
            images[labels == label, 2 * label : 2 * label + 6, 4:24] += 150
        _write_idx(folder / f"{kind}-images-idx3-ubyte", images)
        _write_idx(folder / f"{kind}-labels-idx1-ubyte", labels.astype(np.uint8))


def _write_idx(path: Path, values: npt.NDArray[np.uint8]) -> None:
    sizes = b"".join(struct.pack(">I", size) for size in values.shape)
    path.write_bytes(struct.pack(">HBB", 0, 8, values.ndim) + sizes + values.tobytes())


def _write_cifar(folder: Path, draw: np.random.Generator) -> None:
    """Write images whose class is the brightest third, in CIFAR-10's format."""
    folder.mkdir(parents=True)
    for name, count in [
        *((f"data_batch_{number}", 2560) for number in range(1, 6)),
        ("test_batch", 640),
    ]:
        labels = draw.integers(0, 10, count)
        images = draw.integers(0, 120, (count, 3072), dtype=np.uint8)
        images[np.arange(count), labels] += 100
        content = {"data": images, "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [str(label) for label in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def _write_planetoid(folder: Path, draw: np.random.Generator) -> None:
    """Write a random graph with Cora's sizes, in Planetoid's format."""
    from scipy import sparse

    folder.mkdir(parents=True)
    nodes, tested, trained, words, classes = 2708, 1000, 140, 1433, 7
    labels = np.eye(classes, dtype=np.int32)[draw.integers(0, classes, nodes)]
    features = sparse.csr_matrix(draw.random((nodes, words)) < 0.0127, dtype=np.float32)
    known = nodes - tested
    neighbors = draw.integers(0, nodes, (nodes, 4)).tolist()
    contents = {
        "x": features[:trained],
        "tx": features[known:],
        "allx": features[:known],
        "y": labels[:trained],
        "ty": labels[known:],
        "ally": labels[:known],
        "graph": dict(enumerate(neighbors)),
    }
    for name, content in contents.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(content))
    indices = "\n".join(str(node) for node in range(known, nodes))
    _write(folder / "ind.cora.test.index", indices)


def _write_images(folder: Path, draw: np.random.Generator) -> None:
    """Write JPEG files in a folder per class, and PNG files in one folder."""
    from PIL import Image

    for split, count in (("train", 48), ("val", 16)):
        for kind in range(4):
            place = folder / "images" / split / f"class{kind}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 120, (72, 72, 3), dtype=np.uint8)
                pixels[:, :, kind % 3] += 100
                Image.fromarray(pixels).save(place / f"{number}.jpg")
    flat = folder / "flat" / "train"
    flat.mkdir(parents=True)
    for number in range(128):
        pixels = draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(flat / f"{number}.png")


def _make_lines(draw: np.random.Generator) -> list[str]:
    """Return lines of words with the frequencies of a language."""
    letters = np.array(list("abcdefghijklmnoprstuvw"))
    words = ["".join(draw.choice(letters, draw.integers(2, 9))) for _ in range(_VOCABULARY)]
    return [
        " ".join(words[index % _VOCABULARY] for index in draw.zipf(1.3, draw.integers(5, 18)))
        for _ in range(_LINES)
    ]


def _write_texts(folder: Path, lines: Sequence[str]) -> None:
    parts = {"train": lines[:2300], "valid": lines[-200:], "test": lines[-400:-200]}
    for name, part in parts.items():
        _write(folder / "wikitext-2" / f"{name}.txt", "\n".join(part) + "\n")
    _write(folder / "text" / "input.txt", "\n".join(lines))
    texts = ({"text": " ".join(lines[3 * row : 3 * row + 3])} for row in range(640))
    _write_json_lines(folder / "text" / "pretrain.jsonl", texts)


def _write_hugging_face_data(folder: Path, draw: np.random.Generator, lines: list[str]) -> None:
    def line() -> str:
        return lines[draw.integers(len(lines))]

    def message(role: str) -> dict[str, str]:
        return {"role": role, "content": line()}

    for split, count in (("train", 480), ("validation", 96), ("test", 96)):
        pairs = [(line(), line(), int(draw.integers(2)), row) for row in range(count)]
        names = ["sentence1", "sentence2", "label", "idx"]
        _write_csv(folder / "nyu-mll" / "glue" / "mrpc" / f"{split}.csv", names, pairs)
        scored = [(line(), line(), round(float(draw.random()), 3)) for _ in range(count)]
        names = ["sentence1", "sentence2", "score"]
        _write_csv(folder / "sentence-transformers" / "stsb" / f"{split}.csv", names, scored)
    _write(folder / "nyu-mll" / "glue" / "README.md", _MRPC)
    tasks = ({"instruction": line(), "input": "", "output": line()} for _ in range(400))
    _write_json_lines(folder / "alpaca" / "train.jsonl", tasks)
    for split, count in (("train", 400), ("test", 60)):
        chats = ({"messages": [message("user"), message("assistant")]} for _ in range(count))
        _write_json_lines(folder / "chats" / f"{split}.jsonl", chats)
        preferences = (
            {
                "prompt": [message("user")],
                "chosen": [message("assistant")],
                "rejected": [message("assistant")],
            }
            for _ in range(count)
        )
        _write_json_lines(folder / "preferences" / f"{split}.jsonl", preferences)
        prompts = ({"prompt": [message("user")], "solution": "42"} for _ in range(count))
        _write_json_lines(folder / "prompts" / f"{split}.jsonl", prompts)
    _write(folder / "unet" / "config.json", json.dumps(_UNET))


def _write_models(folder: Path, lines: list[str]) -> None:
    """Write models of three layers with their tokenizers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.implementations import BertWordPieceTokenizer
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DistilBertConfig,
        DistilBertModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token=special[0], eos_token=special[2], pad_token=special[0]
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(llama).save_pretrained(folder / "tinyllama")
    tokenizer.save_pretrained(folder / "tinyllama")

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: index for index, word in enumerate(names + sorted(set(" ".join(lines).split())))}
    wordpieces = PreTrainedTokenizerFast(
        tokenizer_object=BertWordPieceTokenizer(words)._tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
    )
    bert = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
    )
    distilbert = DistilBertConfig(
        vocab_size=len(words), dim=64, n_layers=3, n_heads=4, hidden_dim=128
    )
    for name, model in (
        ("bert-base-cased", BertForMaskedLM(bert)),
        ("distilbert/distilbert-base-uncased", DistilBertModel(distilbert)),
    ):
        model.save_pretrained(folder / name)
        wordpieces.save_pretrained(folder / name)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _write_csv(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)


def _write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))
