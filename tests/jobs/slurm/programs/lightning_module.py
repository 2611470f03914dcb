"""A training script with Lightning, as its documentation has it: ModelCheckpoint, and
ckpt_path="last"."""

import sys
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.08)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().unsqueeze(0)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def on_train_start(self):
        self.print(f"training from step {self.global_step}")

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.print(f"step {self.global_step}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(1)
    nodes, devices, steps = map(int, sys.argv[1:])
    saver = ModelCheckpoint(
        "out", every_n_train_steps=20, save_last="link", save_top_k=-1, save_on_exception=True
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=nodes,
        devices=devices,
        max_steps=steps,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), 2), ckpt_path="last")
    trainer.print(f"at step {trainer.global_step}")
