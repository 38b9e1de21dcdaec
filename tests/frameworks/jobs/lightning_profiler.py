"""Train with Lightning's Trainer and only the profiler, whose steps are those of the optimizer."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
losses = Losses()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = classifier()

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(inputs), labels)
        losses.add(loss)
        return loss

    def validation_step(self, batch, index):
        self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


with tempfile.TemporaryDirectory() as folder:
    L.seed_everything(0, verbose=False)
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=25, save_top_k=-1)
    settings = {
        "max_steps": STEPS, "accelerator": "cpu", "devices": WORLD_SIZE, "logger": False,
        "strategy": "ddp" if WORLD_SIZE > 1 else "auto",
        "enable_progress_bar": False, "enable_model_summary": False, "accumulate_grad_batches": 2,
        "val_check_interval": 40, "limit_val_batches": 2,
    }  # fmt: skip
    # -- paste
    from torchlens_perf.integrations.lightning import TorchlensProfiler

    trainer = L.Trainer(**settings, callbacks=[checkpoints], profiler=TorchlensProfiler())
    # -- end
    trainer.fit(
        Classifier(), DataLoader(Examples(2000), batch_size=2), DataLoader(Examples(8, slow=False))
    )
losses.print(steps=trainer.global_step, tagged={"evaluation": [0, 20, 40], "saving": [25]})
