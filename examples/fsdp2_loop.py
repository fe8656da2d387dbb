"""FSDP2 inside each replica, votes between replicas: accumulation, clipping, saving, resuming.

    torchrun --standalone --nproc_per_node 4 examples/fsdp2_loop.py
    torchrun --standalone --nproc_per_node 4 examples/fsdp2_loop.py --resume --steps 400

Four ranks are two replicas of two ranks, each of which holds half of every parameter. A small
network learns to tell two spirals apart. What is special to DistributedLion is marked "<-".
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

from hf_dlion import DistributedLion, load_momentum, save_momentum


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns points on two noisy spirals, shape (count, 2), and which spiral each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=generator)
    turn = 3 * torch.rand(count, generator=generator).sqrt() * torch.pi
    angle = turn + label * torch.pi
    noise = 0.2 * torch.randn(count, 2, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] + noise, label


def evaluate(step: int, model: nn.Module, points: Tensor, labels: Tensor) -> None:
    """Prints the loss and the accuracy on held-out points; FSDP needs all ranks in the forward."""
    with torch.no_grad():
        logits = model(points)
    if dist.get_rank() == 0:
        loss = cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        print(f"step {step:4d}  held-out loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains, saves, and prints what the ranks sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size // args.shards, args.shards)  # ranks of a replica follow one another
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)
    ).to(device)
    for module in (model[2], model):
        fully_shard(module, mesh=mesh["shard"])  # <- nothing on "replicate"
    assert isinstance(model, FSDPModule)
    replicate = mesh["replicate"]  # <- votes go between replicas
    named = model.named_parameters()
    optimizer = DistributedLion(named, lr=args.lr, weight_decay=0.1, replicate=replicate)  # <-
    optimizer.attach(model)  # <- a step frees gathered parameters before it writes

    begin = 0
    if args.resume:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=args.output_dir / "state")
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        load_momentum(optimizer, args.output_dir)  # <- each rank its own
        begin = saved["step"]

    held_out = [tensor.to(device) for tensor in spirals(2000, 1)]
    evaluate(begin, model, *held_out)
    for step in range(begin, args.steps):
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            # Seeded by where we are, so that a resumed run draws what the first would have drawn.
            seed = (step * args.accumulate + micro) * size + rank
            points, labels = spirals(64, 1000 + seed)
            model.set_requires_gradient_sync(micro == args.accumulate - 1)
            loss = cross_entropy(model(points.to(device)), labels.to(device))
            (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the replica's gradient
        optimizer.step()
        if (step + 1) % 100 == 0:
            evaluate(step + 1, model, *held_out)

    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": max(begin, args.steps)}
    dcp.save(saved, checkpoint_id=args.output_dir / "state")
    save_momentum(optimizer, args.output_dir)  # <- each rank its own
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        bits = 8 * optimizer.wire.last_bytes_sent / held
        print(f"{shape[0]} replicas; rank 0 holds {held:,} numbers and sent {bits:.2f} bits each")


def main() -> None:
    """Starts and ends the process group around `train`."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of the description
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shards", type=int, default=2, help="Ranks of a replica (default: 2).")
    parser.add_argument("--steps", type=int, default=300, help="Number of steps (default: 300).")
    parser.add_argument("--accumulate", type=int, default=2, help="Micro-batches (default: 2).")
    parser.add_argument("--lr", type=float, default=1e-3, help="Learning rate (default: 1e-3).")
    parser.add_argument("--resume", action="store_true", help="Continue from the checkpoint.")
    folder = Path("outputs/fsdp2_loop")
    text = "Folder of the checkpoint (default: %(default)s)."
    parser.add_argument("--output_dir", type=Path, default=folder, help=text)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
