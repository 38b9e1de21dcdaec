"""Frameworks whose own loggers receive the report by one argument.

    usage: framework_loggers.py WAY [breaks]

The argument WAY is trainer, lightning, fabric or accelerate. Each way writes a loss per step into
TensorBoard files in a separate folder. With "breaks", all our functions that a callback calls raise
an error, as if they had a defect.
"""

import logging
import sys
import warnings
from pathlib import Path

import torch
from job import Examples, Losses, Tokens, classifier
from torch.utils.data import DataLoader

import torchlens_perf as perf
from torchlens_perf.watching import Watch

WAY, BREAKS = sys.argv[1], sys.argv[2:] == ["breaks"]
# Each step takes 32 ms.
STEPS = 200
warnings.filterwarnings("ignore")
torch.manual_seed(0)
losses = Losses()
if BREAKS:

    def broken(*args, **kwargs):
        raise RuntimeError("a defect of ours")

    Watch.step = Watch.tag = Watch.log_to = Watch.steps_by_hand = broken


def trainer():
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from torchlens_perf.integrations.huggingface import TorchlensCallback

    set_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    args = TrainingArguments(
        "own", per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, use_cpu=True,
        report_to="tensorboard", disable_tqdm=True, eval_strategy="steps", eval_steps=100, save_steps=100,
    )  # fmt: skip

    class Remember(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.add(logs["loss"])

    model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
    data = {"train_dataset": Tokens(4 * STEPS), "eval_dataset": Tokens(8, slow=False)}
    of_user = Trainer(model, args, **data, callbacks=[Remember()])
    of_user.add_callback(TorchlensCallback(log_to=of_user))
    of_user.train()


def lightning():
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from torchlens_perf.integrations.lightning import TorchlensCallback, TorchlensProfiler

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = classifier()

        def training_step(self, batch, index):
            inputs, labels = batch
            loss = torch.nn.functional.cross_entropy(self.model(inputs), labels)
            losses.add(loss.detach())
            self.log("loss", loss.detach())
            return loss

        def validation_step(self, batch, index):
            self.model(batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    L.seed_everything(0, verbose=False)
    L.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=[TensorBoardLogger("own"), CSVLogger("csv")],
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, val_check_interval=100,
        callbacks=[TorchlensCallback(log_to="trainer")], profiler=TorchlensProfiler(),
    ).fit(Classifier(), DataLoader(Examples(4 * STEPS), batch_size=4), DataLoader(Examples(8, slow=False)))  # fmt: skip


def loop(model, optimizer, loader, backward, log_to, log):
    with perf.watch(model, optimizer) as w:
        w.log_to(log_to)
        for step, (inputs, labels) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.add(loss.detach())
            log({"loss": float(loss.detach())}, step)


def fabric():
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    of_user = Fabric(
        accelerator="cpu", devices=1, loggers=[TensorBoardLogger("own"), CSVLogger("csv")]
    )
    model = classifier()
    model, optimizer = of_user.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = of_user.setup_dataloaders(DataLoader(Examples(4 * STEPS), batch_size=4))
    loop(model, optimizer, loader, of_user.backward, of_user, of_user.log_dict)
    for logger in of_user.loggers:
        logger.finalize("success")


def accelerate():
    from accelerate import Accelerator

    of_user = Accelerator(cpu=True, log_with="tensorboard", project_dir="own")
    of_user.init_trackers("tiny")
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = of_user.prepare(
        model, optimizer, DataLoader(Examples(4 * STEPS), batch_size=4)
    )
    loop(
        model,
        optimizer,
        loader,
        of_user.backward,
        of_user,
        lambda values, step: of_user.log(values, step=step),
    )
    of_user.end_training()


{"trainer": trainer, "lightning": lightning, "fabric": fabric, "accelerate": accelerate}[WAY]()
(board,) = {str(path.parent) for path in Path("own").rglob("events.*")}
losses.print(steps=STEPS, board=board)
