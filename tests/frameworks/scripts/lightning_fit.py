"""Train with Lightning's Trainer: a validation of five batches inside every tenth step, and logged
losses.
"""

import logging
import warnings

import lightning as L
import torch
from script import Losses, classifier, examples, watched
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
losses = Losses()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = classifier()
        self.criterion = torch.nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = self.criterion(self.model(inputs), labels)
        losses.add(loss)
        return loss

    def validation_step(self, batch, index):
        inputs, labels = batch
        self.log("loss", self.criterion(self.model(inputs), labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(0, verbose=False)
module = Classifier()
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, val_check_interval=10, limit_val_batches=5, num_sanity_val_steps=0,
)  # fmt: skip
with watched(module):
    trainer.fit(
        module, DataLoader(examples(320), batch_size=8), DataLoader(examples(80), batch_size=8)
    )
losses.print(steps=40, evaluations=[10, 20, 30, 40])
