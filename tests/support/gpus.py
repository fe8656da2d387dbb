"""Ranks on CPUs that Accelerate takes for ranks on GPUs, where alone it shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState

from accelerate import DistributedType, PartialState


@contextmanager
def as_if_on_gpus() -> Iterator[None]:
    """Makes Accelerate take gloo ranks for those of several GPUs; all devices remain CPUs."""
    original = PartialState.__init__

    def made(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        # TrainingArguments tell Accelerate about FSDP by environment variables.
        with mock.patch.object(PartialState, "__init__", made), mock.patch.dict(os.environ):
            yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
