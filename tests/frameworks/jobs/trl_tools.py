"""Train with TRL's GRPOTrainer and a slow tool, which some samples call and others do not."""

import contextlib
import json
import os
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

import torchlens_perf as perf

TOOL_S, WANTED = 0.1, (0, 1, 2, 1)
"""Duration of a call, and number of calls of each sample of a batch, in one turn each."""

set_seed(0)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
special = ["[PAD]", "[EOS]", "[CALL]", "[RESULT]", *(f"[WANTS {count}]" for count in range(3))]
words = {word: index for index, word in enumerate([*special, *letters])}
EOS, CALL, RESULT, WANTS = (words[each] for each in ("[EOS]", "[CALL]", "[RESULT]", "[WANTS 0]"))
raw = Tokenizer(models.BPE(vocab=words, merges=[]))
raw.add_special_tokens(special)
raw.pre_tokenizer, raw.decoder = (
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    decoders.ByteLevel(),
)


class Words(PreTrainedTokenizerFast):
    def parse_response(self, ids, **rest):
        calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
        return {
            "role": "assistant",
            "content": "",
            **({"tool_calls": calls} if CALL in ids else {}),
        }


tokenizer = Words(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]")
tokenizer.response_template = {}  # TRL asks for one.
tokenizer.chat_template = (
    "{% for each in messages %}{% if each.role == 'tool' %}[RESULT]{{ each.content }}{% else %}{{ each.content }}"
    "{% for call in each.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}[EOS]{% endif %}{% endfor %}"
)


class Model(GPT2LMHeadModel):
    """Generates four tokens, the first of which is a call of the tool if the sample wants one more."""

    def generate(self, input_ids, **settings):
        made = super().generate(input_ids, **settings)
        if self.training or made.shape[1] < input_ids.shape[1] + 4:
            made = torch.nn.functional.pad(made, (0, 4))[:, : input_ids.shape[1] + 4]
        at = input_ids.shape[1]
        for row, prompt in enumerate(input_ids.tolist()):
            wants = next(
                (each - WANTS for each in prompt if 0 <= each - WANTS < 3), WANTED[row % 4]
            )
            made[row, at] = CALL if prompt.count(RESULT) < wants else words["a"]
            made[row, at + 1], made[row, at + 2], made[row, at + 3 :] = (
                WANTS + wants,
                words["b"],
                EOS,
            )
        return made


model = Model(
    GPT2Config(
        vocab_size=len(words), n_positions=256, n_embd=32, n_layer=1, n_head=2, bos_token_id=EOS,
        eos_token_id=EOS, pad_token_id=0,
    )
)  # fmt: skip
data = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"n{index}"}] for index in range(40)]}
)
seen = {"losses": [], "calls": 0}


def look(at: str) -> str:
    """Look at something.

    Args:
        at: what to look at.
    """
    time.sleep(TOOL_S)
    seen["calls"] += 1
    return "found"


class Remember(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            seen["losses"].append(logs["loss"])


with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, per_device_train_batch_size=4, num_generations=4, steps_per_generation=1, max_steps=4,
        gradient_accumulation_steps=1, max_completion_length=100, logging_steps=1, save_strategy="no",
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=[lambda completions, **rest: [1.0, 2.0, 3.0, 4.0]], args=args, train_dataset=data,
        processing_class=tokenizer, tools=[look], callbacks=[Remember()],
    )  # fmt: skip
    with perf.watch() if "WATCHED" in os.environ else contextlib.nullcontext():
        trainer.train()
print(json.dumps(seen))
