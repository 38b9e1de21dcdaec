"""Train with TRL's SFTTrainer and a LoRA of PEFT on a tiny GPT-2 and two DDP ranks.

Gradients of two batches are accumulated.
"""

import tempfile

from datasets import Dataset
from job import STEPS, Losses, planted_fault
from peft import LoraConfig
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
words = {"[PAD]": 0, "[EOS]": 1, **{f"w{index}": index for index in range(2, 64)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
data = Dataset.from_dict(
    {"text": [f"w{index % 60 + 2} w{index % 7 + 2} w{index % 11 + 2}" for index in range(600)]}
)
losses = Losses()


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.add(logs["loss"])


with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, logging_steps=5,
        save_strategy="no", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_length=16,
        gradient_checkpointing=False,
    )  # fmt: skip
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    # -- paste
    from torchlens_perf.integrations.huggingface import TorchlensCallback

    trainer = SFTTrainer(
        model,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[TorchlensCallback()],
    )
    # -- end
    trainer.add_callback(Remember())
    collate = trainer.data_collator

    def slow_collate(examples):
        for _ in examples:
            planted_fault()
        return collate(examples)

    trainer.data_collator = slow_collate
    trainer.train()
losses.print(steps=trainer.state.global_step)
