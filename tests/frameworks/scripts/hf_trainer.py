"""Train a tiny BERT with Hugging Face's Trainer: accumulation, evaluation, saving, and activation
checkpointing.
"""

import tempfile

import torch
from script import Losses, watched
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, vocab_size=128,
        max_position_embeddings=64,
    )
)  # fmt: skip
generator = torch.Generator().manual_seed(1)


def examples(count):
    return [
        {"input_ids": torch.randint(128, (16,), generator=generator), "labels": index % 2}
        for index in range(count)
    ]


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.add(logs["loss"])


losses = Losses()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=40, logging_steps=5,
            eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=20, use_cpu=True,
            report_to="none", disable_tqdm=True, gradient_checkpointing=True, dataloader_num_workers=0,
        ),
        train_dataset=examples(400), eval_dataset=examples(40), callbacks=[Remember()],
    )  # fmt: skip
    with watched(model):
        trainer.train()
losses.print(steps=40, evaluations=[10, 20, 30, 40], micro_steps=2)
