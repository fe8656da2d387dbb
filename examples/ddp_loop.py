"""Plain DDP with accumulation, clipping, a checkpoint and resuming.

    torchrun --standalone --nproc_per_node 2 examples/ddp_loop.py
    torchrun --standalone --nproc_per_node 2 examples/ddp_loop.py --resume --steps 400

A small network learns to tell two spirals apart. What is special to DistributedLion is marked "<-".
"""

import argparse
import gc
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion, load_momentum, save_momentum


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns points on two noisy spirals, shape (count, 2), and which spiral each is on."""
    label = torch.randint(2, (count,), generator=generator)
    turn = 3 * torch.rand(count, generator=generator).sqrt() * torch.pi
    angle = turn + label * torch.pi
    noise = 0.2 * torch.randn(count, 2, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] + noise, label


def evaluate(step: int, model: DistributedDataParallel, points: Tensor, labels: Tensor) -> None:
    """Prints the loss and the accuracy on held-out points; replicas are equal, rank 0 suffices."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            logits = model.module(points)
        loss = cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        print(f"step {step:4d}  held-out loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains, saves, and prints what the ranks sent."""
    rank = dist.get_rank()

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)
    )
    model = DistributedDataParallel(network.to(device))
    optimizer = DistributedLion(model.named_parameters(), lr=args.lr, weight_decay=0.1)  # <-
    optimizer.attach(model)  # <- DDP leaves gradients local

    checkpoint = args.output_dir / "checkpoint.pt"
    begin = 0
    if args.resume:
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        load_momentum(optimizer, args.output_dir)  # <- each rank its own
        begin = saved["step"]

    held_out = [tensor.to(device) for tensor in spirals(2000, torch.Generator().manual_seed(1))]
    evaluate(begin, model, *held_out)
    for step in range(begin, args.steps):
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            # Seeded by where we are, so that a resumed run draws what the first would have drawn.
            seed = (step * args.accumulate + micro) * dist.get_world_size() + rank
            points, labels = spirals(64, torch.Generator().manual_seed(1000 + seed))
            last = micro == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                loss = cross_entropy(model(points.to(device)), labels.to(device))
                (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            evaluate(step + 1, model, *held_out)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": max(begin, args.steps)}, checkpoint)
    save_momentum(optimizer, args.output_dir)  # <- each rank its own
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{size:,} parameters; rank 0 sent {optimizer.wire.last_bytes_sent:,} bytes in the "
            f"last step, a float32 gradient all-reduce sends "
            f"{8 * size * (dist.get_world_size() - 1) // dist.get_world_size():,}"
        )


def main() -> None:
    """Starts and ends the process group around `train`."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of the description
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=300, help="Number of steps (default: 300).")
    parser.add_argument("--accumulate", type=int, default=2, help="Micro-batches (default: 2).")
    parser.add_argument("--lr", type=float, default=1e-3, help="Learning rate (default: 1e-3).")
    parser.add_argument("--resume", action="store_true", help="Continue from the checkpoint.")
    folder = Path("outputs/ddp_loop")
    text = "Folder of the checkpoint (default: %(default)s)."
    parser.add_argument("--output_dir", type=Path, default=folder, help=text)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    train(args, device)
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
