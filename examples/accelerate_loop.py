"""An Accelerate loop with accumulation, clipping, checkpoints and resuming.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py
    torchrun --standalone --nproc_per_node 2 examples/accelerate_loop.py --resume --epochs 6

A small network learns to write Python: it predicts the next byte of the standard library's
`argparse.py`. What is special to DistributedLion is marked "<-".
"""

import argparse
import gc
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hf_dlion.accelerate
from accelerate import Accelerator
from hf_dlion import DistributedLion


class NextByte(nn.Module):
    """A recurrent network over bytes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of predicting each byte of `text`, shape (batch, length)."""
        hidden, _ = self.recurrence(self.embedding(text[:, :-1]))
        return cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def evaluate(epoch: int, accelerator: Accelerator, model: nn.Module, held_out: DataLoader) -> None:
    """Print the mean loss on held-out text; every rank calls this."""
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather(model(batch)) for (batch,) in held_out]
    accelerator.print(f"epoch {epoch}  held-out loss {torch.stack(losses).mean():.4f}")


def train(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train, evaluate and save once an epoch."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    blocks = text[: len(text) // 65 * 65].view(-1, 65).long()
    cut = len(blocks) // 10
    batches = DataLoader(TensorDataset(blocks[cut:]), batch_size=8, shuffle=True)
    held_out = DataLoader(TensorDataset(blocks[:cut]), batch_size=32)

    model = NextByte()
    lion = DistributedLion(model.named_parameters(), lr=args.lr, weight_decay=0.1)  # <-
    model, optimizer, batches, held_out = accelerator.prepare(model, lion, batches, held_out)
    hf_dlion.accelerate.attach(accelerator, model)  # <- votes, and checkpoints of every rank

    saved = args.output_dir / "checkpoint"
    begin = 0
    if args.resume:
        accelerator.load_state(saved)
        begin = int((saved / "epoch.txt").read_text())
    evaluate(begin, accelerator, model, held_out)
    for epoch in range(begin, args.epochs):
        model.train()
        batches.set_epoch(epoch)  # another order in every epoch, the same after resuming
        for (batch,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        evaluate(epoch + 1, accelerator, model, held_out)
        accelerator.save_state(saved)
        if accelerator.is_main_process:
            (saved / "epoch.txt").write_text(str(epoch + 1))

    size = sum(p.numel() for p in model.parameters())
    sent = lion.wire.last_bytes_sent
    accelerator.print(f"{size:,} parameters; rank 0 sent {sent:,} bytes in the last step")


def main() -> None:
    """Start and end Accelerate around `train`."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of the description
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--epochs", type=int, default=4, help="Number of epochs (default: 4).")
    parser.add_argument("--lr", type=float, default=2e-3, help="Learning rate (default: 2e-3).")
    parser.add_argument("--resume", action="store_true", help="Continue from the checkpoint.")
    folder = Path("outputs/accelerate_loop")
    text = "Folder of the checkpoint (default: %(default)s)."
    parser.add_argument("--output_dir", type=Path, default=folder, help=text)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        # set_epoch() then decides the order, whatever else has drawn random numbers.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    train(args, accelerator)
    # gloo may abort the process if a DDP model outlives its process group.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
