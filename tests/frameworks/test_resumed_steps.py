"""The step from which a framework continues, which shows how many steps a restart has lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_warm, runs
from torchlens_perf.report.run_report import load_report

TRAIN = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from torchlens_perf.integrations.huggingface import TorchlensCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.linear(x)
        return {"loss": (out - labels).square().mean(), "logits": out}

rows = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 64
arguments = TrainingArguments("out", max_steps=int(sys.argv[1]), save_steps=5, report_to=[], use_cpu=True,
                              per_device_train_batch_size=2, disable_tqdm=True)
trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[TorchlensCallback(report="off")])
trainer.train(resume_from_checkpoint=sys.argv[2] == "again")
"""


def test_run_of_a_trainer_knows_the_step_from_which_it_continues(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers: make test-frameworks")
    (tmp_path / "train.py").write_text(TRAIN)
    for steps, which in ((8, "first"), (12, "again")):
        done = run_warm([sys.executable, "train.py", str(steps), which], tmp_path)
        assert done.returncode == 0, done.stderr
    found = [load_report(run)["goodput"] for run in runs(tmp_path)]
    attempts = [each.attempts[0] for each in found if each is not None]
    # The Trainer also saves its last step.
    assert [(each.first_step, each.steps) for each in attempts] == [(0, 8), (8, 4)]
