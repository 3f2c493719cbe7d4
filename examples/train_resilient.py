"""A training script that survives: killed ranks, restarts, and another number of ranks.

    torchrun --max-restarts=3 --nproc-per-node=2 examples/train_resilient.py --folder /tmp/run

After a failure torchrun starts all ranks again; they load the newest whole checkpoint and go on.
Run it again with another --nproc-per-node, and it plans for those ranks and goes on with the same
global batches. `--kill RANK:STEP` kills a rank once, when it has trained that many batches: the
digest of the weights that is printed at the end stays the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar

TEXT = Path(__file__).parent / "wisdom.txt"
LENGTH, VOCABULARY, WIDTH = 8, 256, 32


class NextByte(nn.Module):
    """Returns the loss: cross-entropy of the byte after `ids`. Dropout goes on after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(LENGTH * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, VOCABULARY)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.up(self.embed(ids).flatten(1))))
        return nn.functional.cross_entropy(self.down(h), target)


class Bytes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Each run of bytes of a text, with the byte after it."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        end = index + LENGTH
        return {"ids": self.text[index:end], "target": self.text[end]}


def train(folder: Path, n_steps: int, save_every: int, kill: str | None) -> str:
    """One rank's part of the job; returns the digest of the final weights."""
    torch.manual_seed(0)
    dataset = Bytes()
    batch = torch.utils.data.default_collate([dataset[i] for i in range(16)])
    run = autopar.resilient(folder, NextByte().double(), batch, save_every=save_every)
    optimizer = torch.optim.AdamW(run.pm.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    loader = run.pm.dataloader(dataset, batch_size=16, shuffle=True, drop_last=True, seed=0)
    states = {"schedule": schedule}
    batches = run.batches(loader, optimizer, states=states, n_steps=n_steps)
    tell(f"{run.n_steps} of {n_steps} batches are trained")
    for batch in batches:
        loss = run.pm.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tell(f"batch {run.n_steps + 1}  loss {loss.item():.12f}")
        kill_once(kill, run.n_steps + 1, folder)
    found = digest(run.pm.full_state_dict())
    tell(f"weights {found} after {run.n_samples} samples")
    return found


def tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def kill_once(kill: str | None, n_done: int, folder: Path) -> None:
    """End this process by SIGKILL, unless that was done before in this run."""
    mark = folder / "killed"
    if f"{os.environ.get('RANK')}:{n_done}" == kill and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def digest(state: Any) -> str:
    """SHA-256 of all weights."""
    hashed = hashlib.sha256()
    for name in sorted(state):
        hashed.update(state[name].cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints and plans")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--kill", metavar="RANK:STEP", help="kill this rank once")
    given = parser.parse_args()
    train(given.folder, given.steps, given.save_every, given.kill)


if __name__ == "__main__":
    main()
