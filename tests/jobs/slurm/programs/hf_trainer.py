"""A training script with Hugging Face's Trainer, as its documentation has it."""

import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(128, (32,), generator=generator)
        time.sleep(0.08)
        return {"input_ids": tokens, "labels": tokens}


set_seed(1)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
arguments = TrainingArguments(
    output_dir="out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=2,
    logging_steps=1,
    save_steps=20,
    save_total_limit=2,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    ddp_backend="gloo",
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens())
last = get_last_checkpoint("out") if os.path.isdir("out") else None
if trainer.is_world_process_zero():
    print(f"resuming from {last}")
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    print(f"at step {trainer.state.global_step}")
