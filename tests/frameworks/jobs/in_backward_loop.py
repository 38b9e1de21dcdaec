"""Train with optimizers inside the backward pass.

Each parameter has an optimizer that steps as soon as the parameter's gradient is complete.
"""

import torch
from job import STEPS, Examples, Losses, classifier
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = classifier()
loader = DataLoader(Examples(4 * STEPS), batch_size=4)
losses = Losses()
# -- paste
import torchlens_perf as perf

optimizers = {parameter: torch.optim.Adam([parameter], lr=1e-3) for parameter in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)
with perf.watch(model) as w:
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
