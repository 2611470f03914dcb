"""Training loops of several frameworks over the same batches, for benchmarks/side_by_side.py.

    python -m benchmarks.frameworks NAME job.json

trains one model from the weights and on the rows in the job's directory, and stops before each
turn until a line comes on standard input. Each line of its standard output is JSON: the seconds
of the turn before, and at the end the loss of the last step. What the frameworks print goes to
standard error.

All compute in fp32 without compilation, clip gradients to norm 1, update with the fused AdamW
without weight decay at a constant rate, and log the loss once a turn.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WARM_UP = 3  # turns that do not count
LR, BETAS, EPS, CLIP = 1e-3, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Job:
    """The work of all frameworks. `directory`: has model/, in Hugging Face format, and rows.npy,
    int64 [total * batch, seq_len + 1]. `config`, `words`: what the trainer is started with."""

    directory: str
    config: str
    words: list[str]
    steps: int  # of a turn
    turns: int  # that count
    batch: int
    seq_len: int

    @property
    def total(self) -> int:
        """Steps in all: after the turns that count another one, for the loss."""
        return (WARM_UP + self.turns + 1) * self.steps

    @property
    def model(self) -> Path:
        return Path(self.directory, "model")

    def out(self, name: str) -> Path:
        return Path(self.directory, "out", name)


class Gate:
    """Stops the process before each turn that counts. Call it whenever a batch is read: a framework
    that reads one ahead computes as many batches in a turn as the others."""

    def __init__(self, job: Job, say: Callable[[dict[str, float]], None]) -> None:
        self._job, self._say, self._calls, self._mark = job, say, 0, clocks()

    def __call__(self) -> None:
        turn, step = divmod(self._calls - WARM_UP * self._job.steps, self._job.steps)
        self._calls += 1
        if step or not 0 <= turn <= self._job.turns:
            return
        now = clocks()
        self._say({clock: now[clock] - self._mark[clock] for clock in now})
        if not sys.stdin.readline():
            os._exit(1)  # the benchmark has ended
        self._mark = clocks()


def clocks() -> dict[str, float]:
    """Seconds of the main thread and of all threads on the CPUs, and by the clock."""
    return {"main": time.thread_time(), "all": time.process_time(), "wall": time.perf_counter()}


class Rows:
    """The rows as a data set of torch, one list of rows for each batch. `form`: makes an item."""

    def __init__(self, job: Job, gate: Callable[[], None], form: Callable[[Any], Any]) -> None:
        self._rows = np.load(Path(job.directory, "rows.npy"), mmap_mode="r")
        self._gate, self._form = gate, form

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        import torch

        self._gate()
        return [self._form(torch.from_numpy(self._rows[number].copy())) for number in numbers]


def batches_of(job: Job, gate: Callable[[], None]) -> Any:
    """The DataLoader of the loops that take one: batches of rows, int64 [B, T + 1]."""
    from torch.utils.data import DataLoader

    return DataLoader(Rows(job, gate, lambda row: row), job.batch)  # type: ignore[arg-type]


def adamw(model: Any) -> Any:
    from torch.optim import AdamW

    return AdamW(model.parameters(), LR, BETAS, EPS, weight_decay=0.0, fused=True)


# --- the models, all with the same weights ------------------------------------------------------


def weights_of(job: Job) -> tuple[Any, dict[str, Any]]:
    """The shape, and the weights by the names that the decoder gives them."""
    from safetensors.torch import load_file

    from kempner.extensions.hf.families import model_values
    from kempner.extensions.hf.tensors import tensor_names
    from kempner.model.config import ModelConfig

    file = job.model / "config.json"
    cfg = ModelConfig(**model_values(json.loads(file.read_text()), str(file)))
    stored = load_file(job.model / "model.safetensors")
    return cfg, {own: stored[theirs] for own, theirs in tensor_names(cfg, "llama").items()}


def kempner_model(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    from kempner.model.decoder import Decoder

    cfg, weights = weights_of(job)
    model = Decoder(cfg)
    model.load_state_dict(weights, strict=False)  # buffers are not stored

    def loss(rows: Any) -> Any:
        inputs = rows[:, :-1].contiguous()
        return model(inputs, rows[:, 1:].contiguous()) / inputs.numel()

    return model, loss


def hf_model(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="float32")
    # Otherwise the forward pass also fills a cache of keys, which a training does not need.
    model.config.use_cache = False

    def loss(rows: Any) -> Any:
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return model(input_ids=inputs, labels=inputs, shift_labels=targets).loss

    return model, loss


def litgpt_model(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    from litgpt.model import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    cfg, weights = weights_of(job)
    model = GPT(
        Config(
            block_size=job.seq_len, vocab_size=cfg.vocab_size, padded_vocab_size=cfg.vocab_size,
            n_layer=cfg.n_layers, n_embd=cfg.dim, n_head=cfg.n_heads, n_query_groups=cfg.kv_heads,
            intermediate_size=cfg.ffn_dim, norm_eps=cfg.norm_eps, rope_base=int(cfg.rope_theta),
            rotary_percentage=1.0, parallel_residual=False, bias=False,
            norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        )
    )  # fmt: skip
    names = {
        "norm_1": "attention_norm", "attn.proj": "attention.wo", "norm_2": "ffn_norm",
        "mlp.fc_1": "ffn.w1", "mlp.fc_2": "ffn.w3", "mlp.proj": "ffn.w2",
    }  # fmt: skip
    theirs = {
        "transformer.wte.weight": weights["embed.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "lm_head.weight": weights.get("output.weight", weights["embed.weight"]),
    }
    for i in range(cfg.n_layers):
        block, own = f"transformer.h.{i}", f"blocks.{i}"
        qkv = [weights[f"{own}.attention.w{part}.weight"] for part in "qkv"]
        theirs[f"{block}.attn.qkv.weight"] = torch.cat(qkv)
        theirs |= {f"{block}.{a}.weight": weights[f"{own}.{b}.weight"] for a, b in names.items()}
    model.load_state_dict(theirs)
    if cfg.tie_embeddings:
        model.transformer.wte.weight = model.lm_head.weight  # as litgpt.pretrain does

    def loss(rows: Any) -> Any:
        return chunked_cross_entropy(model(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())

    return model, loss


# --- the loops; each returns the loss of the last step ------------------------------------------


def bare_loop(job: Job, gate: Gate, model: Any, loss_of: Callable[[Any], Any]) -> float:
    """The loop that everybody writes first."""
    from torch.nn.utils import clip_grad_norm_

    optimizer, last = adamw(model), math.nan
    for step, rows in enumerate(batches_of(job, gate), 1):
        loss = loss_of(rows)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % job.steps == 0:
            last = loss.item()
            print(f"step {step}: loss {last:.4f}")
    return last


def bare(job: Job, gate: Gate) -> float:
    return bare_loop(job, gate, *kempner_model(job))


def hf_bare(job: Job, gate: Gate) -> float:
    return bare_loop(job, gate, *hf_model(job))


def litgpt_bare(job: Job, gate: Gate) -> float:
    return bare_loop(job, gate, *litgpt_model(job))


def kempner(job: Job, gate: Gate) -> float:
    """scripts/train.py, which reads the rows from the data set itself."""
    from benchmarks.trainer import before_each_step
    from kempner.jobs.records.run_history import load_history
    from kempner.train.configure import configure
    from kempner.train.resilience import requests
    from scripts import train

    stop, out = requests.StopRequests(), job.out("kempner")
    words = [
        *job.words, f"--model.init_from={job.model}", f"--run.dir={out}", "--train.dtype=fp32",
        f"--train.grad_clip={CLIP}", f"--optimizer.lr={LR}", "--optimizer.weight_decay=0",
        f"--optimizer.betas={list(BETAS)}", f"--optimizer.eps={EPS}", "--schedule.name=none",
        "--schedule.warmup_steps=0", f"--train.max_steps={job.total}", "--checkpoint.interval=0",
        "--eval.interval=0", f"--metrics.log_interval={job.steps}", "--resilience.hang_timeout=1e5",
    ]  # fmt: skip
    cfg = configure([job.config, *words], stop)
    requests.LONG_STEP_S = math.inf  # type: ignore[misc]  # a step that waits for its turn is none
    before_each_step(lambda _: gate())
    if train.main(cfg, stop):
        sys.exit(1)
    return float(load_history(out).losses[-1]["loss"])


def lightning(job: Job, gate: Gate) -> float:
    """Lightning's Trainer, with the model of the bare loop."""
    import lightning as pl
    from lightning.pytorch.loggers import CSVLogger

    model, loss_of = kempner_model(job)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, rows: Any, _: int) -> Any:
            loss = loss_of(rows)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, precision="32-true", max_epochs=1, gradient_clip_val=CLIP,
        logger=CSVLogger(job.out("lightning")), log_every_n_steps=job.steps,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), batches_of(job, gate))
    return float(trainer.callback_metrics["loss"])


def litgpt(job: Job, gate: Gate) -> float:
    """fit() of litgpt.pretrain, with its GPT: its main() would compile the model."""
    import lightning as pl
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.utils import choose_logger

    out = job.out("litgpt")
    logger = choose_logger("csv", out, name="pretrain", log_interval=job.steps)
    fabric = pl.Fabric(accelerator="cpu", devices=1, precision="32-true", loggers=[logger])
    fabric.launch()
    model, _ = litgpt_model(job)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(adamw(model))
    loader, held_out = fabric.setup_dataloaders(
        batches_of(job, gate), batches_of(job, lambda: None)
    )
    state = {
        "model": model, "optimizer": optimizer, "train_dataloader": loader,
        "iter_num": 0, "step_count": 0,
    }  # fmt: skip
    args = TrainArgs(
        save_interval=None, log_interval=job.steps, global_batch_size=job.batch,
        micro_batch_size=job.batch, max_tokens=job.total * job.batch * job.seq_len,
        max_norm=CLIP, min_lr=LR, lr_warmup_steps=0,
    )  # fmt: skip
    evaluation = EvalArgs(interval=job.total + 1, max_iters=1, final_validation=False)
    pretrain.fit(fabric, 1, state, loader, held_out, out, None, args, evaluation)
    logger.save()
    (file,) = out.rglob("metrics.csv")
    return float(list(csv.DictReader(file.read_text().splitlines()))[-1]["loss"])


def hf(job: Job, gate: Gate) -> float:
    """Hugging Face's Trainer, with its Llama."""
    from transformers import Trainer, TrainingArguments

    def form(row: Any) -> dict[str, Any]:  # the model would shift them by one, and lose a target
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}

    model, _ = hf_model(job)
    args = TrainingArguments(
        str(job.out("hf")), use_cpu=True, max_steps=job.total, optim="adamw_torch_fused",
        per_device_train_batch_size=job.batch, learning_rate=LR, lr_scheduler_type="constant",
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, weight_decay=0.0,
        max_grad_norm=CLIP, logging_steps=job.steps, report_to="none", save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    last: deque[Any] = deque(maxlen=1)  # its own log has means over several steps
    model.register_forward_hook(lambda *call: last.append(call[2].loss.detach()))
    Trainer(model, args, train_dataset=Rows(job, gate, form)).train()  # type: ignore[arg-type]
    return float(last[0])


class Framework(NamedTuple):
    title: str
    packages: tuple[str, ...]  # to import
    loop: Callable[[Job, Gate], float]
    beside: str  # the bare loop over the same model


FRAMEWORKS = {
    "bare": Framework("bare loop, kempner's model", (), bare, "bare"),
    "kempner": Framework("kempner", (), kempner, "bare"),
    "lightning": Framework("Lightning, kempner's model", ("lightning",), lightning, "bare"),
    "litgpt-bare": Framework("bare loop, litgpt's GPT", ("litgpt",), litgpt_bare, "litgpt-bare"),
    "litgpt": Framework("litgpt, its GPT", ("litgpt",), litgpt, "litgpt-bare"),
    "hf-bare": Framework("bare loop, transformers' Llama", ("transformers",), hf_bare, "hf-bare"),
    "hf": Framework(
        "Hugging Face Trainer, its Llama", ("transformers", "accelerate"), hf, "hf-bare"
    ),
}


def main(name: str, file: str) -> None:
    # Answers keep standard output; whatever a framework prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    job = Job(**json.loads(Path(file).read_text()))

    def say(answer: dict[str, float]) -> None:
        print(json.dumps(answer), file=answers)

    say({"loss": FRAMEWORKS[name].loop(job, Gate(job, say))})
    sys.stdout.flush()
    # Exit handlers of a framework may wait for threads that it has left.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
