"""Train in a loop with three loggers at once: TensorBoard, W&B offline, and MLflow in a folder.

The job's data is slow. A verdict comes at the last step.
"""

import os
import sys

os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true")
import mlflow
import torch
import wandb
from job import Examples, Losses, classifier
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

# Each step takes 32 ms.
STEPS = 100
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Examples(4 * STEPS), batch_size=4)
losses = Losses()
writer = SummaryWriter("tensorboard")
run = wandb.init(project="tiny", dir=".")
mlflow.set_tracking_uri("file:./mlruns")
mlflow.start_run()
import torchlens_perf as perf
from torchlens_perf.run.verdicts import Alert

VERDICT = Alert(
    "1" * 32, "a" * 32, "straggler", "started", "Rank 3 is slow.", "look at its host.", 1_500_000_000, 0
)  # fmt: skip
w = perf.watch(model, optimizer)
w.log_to([writer, run, mlflow])
with w:
    for step, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss)
        writer.add_scalar("loss", float(loss), step)
        run.log({"loss": float(loss)})
    for callback in w._get_live_views().alerts.callbacks:
        callback(VERDICT)
losses.print(steps=step + 1, moved=run.step)
writer.close()
run.finish()
mlflow.end_run()
sys.stdout.flush()
