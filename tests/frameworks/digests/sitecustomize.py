"""Writes a digest of the trained weights into $DIGESTS when a Trainer has trained.

It also changes two things that frameworks do for GPUs only, whatever the optimizer, and stands for
a user's own sitecustomize.py, which `hf-dlion run` must not hide.
"""

import functools
import hashlib
import json
import os
import sys


class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "transformers.trainer" or "DIGESTS" not in os.environ:
            return None
        sys.meta_path.remove(cls)
        from importlib.util import find_spec

        spec = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _wrap(module.Trainer)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(trainer_class):
    import torch

    original, load = trainer_class.train, torch.load

    @functools.wraps(load)
    def load_on_cpu(*args, **kwargs):
        # transformers 5.6 to 5.16 pass "cpu:0", which torch refuses, with any optimizer.
        if str(kwargs.get("map_location")) == "cpu:0":
            kwargs["map_location"] = "cpu"
        return load(*args, **kwargs)

    torch.load = load_on_cpu

    from transformers import PreTrainedModel

    from_pretrained = PreTrainedModel.from_pretrained.__func__

    @functools.wraps(from_pretrained)
    def from_pretrained_on_cpu(cls, *args, **kwargs):
        # axolotl asks for the GPU with the rank's number.
        if kwargs.get("device_map") in ({"": 0}, {"": 1}):
            del kwargs["device_map"]
        return from_pretrained(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained_on_cpu)

    @functools.wraps(original)
    def train(self, *args, **kwargs):
        gradients = []

        def note(optimizer, *_):
            if type(optimizer).__name__ == "DistributedLion":
                params = [p for group in optimizer.param_groups for p in group["params"]]
                gradients[:] = [p.grad.detach().clone() for p in params if p.grad is not None]

        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handle = register_optimizer_step_pre_hook(note)
        result = original(self, *args, **kwargs)
        handle.remove()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        found = {
            "weights": _digest(dict(self.model.named_parameters()).values()),
            "gradient": _digest(gradients),
            "optimizer": type(optimizer).__name__,
            "steps": self.state.global_step,
        }
        path = os.path.join(os.environ["DIGESTS"], f"rank_{self.args.process_index}.json")
        with open(path, "w") as file:
            json.dump(found, file)
        return result

    trainer_class.train = train


def _digest(tensors):
    import torch

    value = hashlib.sha256()
    for tensor in tensors:
        value.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return value.hexdigest()


sys.meta_path.insert(0, _Finder)
