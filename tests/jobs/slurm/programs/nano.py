"""A training script as many have it: one file, settings at its top, DDP from torchrun's variables,
and one checkpoint that it writes over and over. It knows nothing of this kit."""

import os
import sys
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
max_iters = int(sys.argv[1])
save_interval = 20
batch_size, block_size, vocab_size, n_embd = 4, 32, 64, 32

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, world_size = 0, 1
master_process = rank == 0
os.makedirs(out_dir, exist_ok=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.block(self.wte(x), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.view(-1, vocab_size), y.reshape(-1))


def get_batch(it):
    generator = torch.Generator().manual_seed(it * world_size + rank)
    tokens = torch.randint(vocab_size, (batch_size, block_size + 1), generator=generator)
    time.sleep(0.15)
    return tokens[:, :-1], tokens[:, 1:]


torch.manual_seed(1337)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iter_num = 0
checkpoint_path = os.path.join(out_dir, "ckpt.pt")
if os.path.exists(checkpoint_path):
    checkpoint = torch.load(checkpoint_path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    if master_process:
        print(f"resuming at iter {iter_num}")
raw_model = model
if ddp:
    model = DDP(model)

while iter_num < max_iters:
    loss = model(*get_batch(iter_num))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iter_num += 1
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.6f}")
    if master_process and iter_num % save_interval == 0:
        state = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
        }
        torch.save(state, checkpoint_path)

if ddp:
    destroy_process_group()
