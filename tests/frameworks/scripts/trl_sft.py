"""Train a tiny GPT-2 with TRL's SFTTrainer, without downloads."""

import tempfile

import torch
from datasets import Dataset
from script import Losses, watched
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = [f"w{number}" for number in range(60)]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
model = GPT2LMHeadModel(
    GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=len(vocabulary), n_positions=64)
)
generator = torch.Generator().manual_seed(1)
texts = [
    " ".join(words[index] for index in torch.randint(60, (20,), generator=generator))
    for _ in range(240)
]
losses = Losses()


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.add(logs["loss"])


with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            folder, per_device_train_batch_size=4, max_steps=30, logging_steps=5, use_cpu=True, report_to="none",
            disable_tqdm=True, save_strategy="no", bf16=False, max_length=32,
        ),
        train_dataset=Dataset.from_dict({"text": texts}), processing_class=fast, callbacks=[Remember()],
    )  # fmt: skip
    with watched(model):
        trainer.train()
losses.print(steps=30)
