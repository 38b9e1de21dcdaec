"""Train with Ray Train: a TorchTrainer with two workers, which write their results to files."""

import json
import os
import pathlib
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER, HERE = os.getcwd(), os.path.dirname(__file__)


def train_func():
    # Workers start in one of Ray's folders.
    os.chdir(FOLDER)
    sys.path.insert(0, HERE)
    import job
    import ray.train
    import torch
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    rank, world_size = (
        ray.train.get_context().get_world_rank(),
        ray.train.get_context().get_world_size(),
    )
    job.IS_SLOW = rank == world_size - 1
    losses = job.Losses()
    model = prepare_model(job.classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = prepare_data_loader(DataLoader(job.Examples(4 * job.STEPS * world_size), batch_size=4))
    # -- paste
    import torchlens_perf as perf  # inside of train_func: workers record

    with perf.watch(model, optimizer) as w:
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # -- end
            losses.add(loss)
    if rank == 0:
        pathlib.Path("losses.json").write_text(json.dumps(losses.facts(steps=job.STEPS)))
    ray.train.report({"loss": float(loss)})


of_workers = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("TORCHLENS", "PYTHONPATH", "OMP_"))
}
ray.init(
    num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": of_workers}
)
trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=f"{FOLDER}/ray"),
)
trainer.fit()
ray.shutdown()
print(pathlib.Path("losses.json").read_text())
