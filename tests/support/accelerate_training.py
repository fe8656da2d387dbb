"""A plain loop with Accelerate."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

import hf_dlion
from accelerate import Accelerator
from hf_dlion import DistributedLion
from tests.support.tiny import weights_digest


class Loop:
    """What a user writes: construct, prepare, iterate."""

    def __init__(self, *, attach=True, accumulate=1, project=None, **options):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        optimizer = DistributedLion(self.model.parameters(), lr=1e-2, **options)
        data = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, project_config=project
        )
        if attach:
            hf_dlion.accelerate.attach(self.accelerator)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        self.wrapped, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, optimizer, DataLoader(data, batch_size=4), schedule
        )
        self.lion = optimizer

    def train(self, steps):
        for _, (x, y) in zip(range(steps), self.loader, strict=False):
            with self.accelerator.accumulate(self.wrapped):
                loss = torch.nn.functional.mse_loss(self.wrapped(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def digest(self):
        return weights_digest(self.model)

    def momenta(self):
        return [self.lion.state[p]["exp_avg"].clone() for p in self.model.parameters()]
