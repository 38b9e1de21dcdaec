"""Train a tiny BERT with Hugging Face's Trainer on two DDP ranks: accumulation over two batches,
evaluation, saving.
"""

import tempfile

from job import STEPS, Losses, Tokens
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(0)
model = BertForMaskedLM(
    BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
)


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.add(logs["loss"])


losses = Losses()
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, logging_steps=5,
        eval_strategy="steps", eval_steps=20, save_strategy="steps", save_steps=25, use_cpu=True,
        report_to="none", disable_tqdm=True, eval_on_start=True,
    )  # fmt: skip
    data = {"train_dataset": Tokens(1000), "eval_dataset": Tokens(8, slow=False)}
    # -- paste
    from torchlens_perf.integrations.huggingface import TorchlensCallback

    trainer = Trainer(model, args, **data, callbacks=[TorchlensCallback()])
    # -- end
    trainer.add_callback(Remember())
    trainer.train()
losses.print(steps=trainer.state.global_step, tagged={"evaluation": [0, 20, 40], "saving": [25]})
