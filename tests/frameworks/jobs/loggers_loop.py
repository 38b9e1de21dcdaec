"""Train in a loop with four loggers at once: TensorBoard, W&B offline, MLflow in a folder, and a
function.

The job's data is slow.

The loop continues until the function has received three rows, because the sidecar takes some time
to start.
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

# This limit of steps takes about two minutes.
MAX_STEPS = 3000
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Examples(4 * MAX_STEPS), batch_size=4)
losses = Losses()
writer = SummaryWriter("tensorboard")
run = wandb.init(project="tiny", dir=".")
mlflow.set_tracking_uri("file:./mlruns")
mlflow.start_run()
import torchlens_perf as perf

w = perf.watch(model, optimizer)
rows = []
w.log_to([writer, run, mlflow, lambda figures, step: rows.append([step, figures])], every_s=0.2)
with w:
    for step, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss)
        writer.add_scalar("loss", float(loss), step)
        run.log({"loss": float(loss)})
        if len(rows) >= 3:
            break
losses.print(steps=step + 1, rows=rows, moved=run.step)
writer.close()
run.finish()
mlflow.end_run()
sys.stdout.flush()
