"""Train with TRL's GRPOTrainer, which generates itself, and a slow reward."""

import contextlib
import json
import os
import tempfile
import time

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

import torchlens_perf as perf

set_seed(0)
words = {"[PAD]": 0, "[EOS]": 1, **{f"w{index}": index for index in range(2, 64)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1,
        eos_token_id=1, pad_token_id=0,
    )
)  # fmt: skip
data = Dataset.from_dict(
    {"prompt": [f"w{index % 60 + 2} w{index % 7 + 2}" for index in range(100)]}
)
seen = {"losses": [], "tokens": 0}


def reward(completion_ids, **rest):
    time.sleep(0.1)
    seen["tokens"] += sum(map(len, completion_ids))
    return [float(len(each) % 5) for each in completion_ids]


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            seen["losses"].append(logs["loss"])


with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, per_device_train_batch_size=4, num_generations=4, steps_per_generation=3, max_steps=12,
        gradient_accumulation_steps=1, max_completion_length=8, logging_steps=1, save_strategy="no",
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=[reward], args=args, train_dataset=data, processing_class=tokenizer,
        callbacks=[Remember()],
    )  # fmt: skip
    with perf.watch() if "WATCHED" in os.environ else contextlib.nullcontext():
        trainer.train()
print(json.dumps(seen))
