"""How long an update takes, and how much state it keeps, for each optimizer: ratios to AdamW.

    python -m benchmarks.optimizers [--dim 256] [--layers 2] [--rounds 20] [--device cpu]

All optimizers have a copy of the same decoder and update it by turns. On a CPU what counts is the
CPU time of this process, on one thread: other work on the machine hardly changes it. The gradients
are random numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kempner.jobs.report.tables import align_table
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.optim.build import build_optimizer
from kempner.optim.config import OptimizerConfig
from kempner.optim.optimizer import Optimizer

KINDS = {
    "adamw": OptimizerConfig(),
    "adamw, bf16": OptimizerConfig(moments="bf16"),
    "adamw, cpu_offload": OptimizerConfig(cpu_offload=True),
    "muon": OptimizerConfig(name="muon"),
    "lion": OptimizerConfig(name="lion"),
    "schedule_free": OptimizerConfig(name="schedule_free"),
}


class Case:
    """A model and its optimizer."""

    def __init__(self, shape: ModelConfig, cfg: OptimizerConfig, device: torch.device) -> None:
        self.model = Decoder(shape).to(device)
        self.optimizer: Optimizer = build_optimizer(self.model, cfg)
        self.gradients = [torch.randn_like(p) for p in self.model.parameters()]
        self.seconds: list[float] = []

    def update(self) -> None:
        for p, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            p.grad = gradient
        on_gpu = self.gradients[0].is_cuda
        now = time.perf_counter if on_gpu else time.process_time
        began = now()
        self.optimizer.step()
        # Kernels only start in step().
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds.append(now() - began)

    @property
    def bytes_per_parameter(self) -> float:
        state = [x for each in self.optimizer.state.values() for x in each.values()]
        return sum(x.nbytes for x in state) / sum(p.numel() for p in self.model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = ModelConfig(
        vocab_size=2048, dim=given.dim, n_layers=given.layers, n_heads=given.dim // 64,
        ffn_dim=given.dim * 11 // 4, max_seq_len=128,
    )  # fmt: skip
    cases = {name: Case(shape, cfg, torch.device(given.device)) for name, cfg in KINDS.items()}
    for turn in range(given.rounds + 1):
        for case in cases.values():
            case.update()
            if not turn:
                case.seconds.clear()  # it has made its state
    plain = cases["adamw"].seconds
    rows = [["optimizer", "time of an update, adamw = 1", "state, bytes per parameter"]]
    for name, case in cases.items():
        ratios = [mine / theirs for mine, theirs in zip(case.seconds, plain, strict=True)]
        rows.append([name, f"{statistics.median(ratios):.2f}", f"{case.bytes_per_parameter:.2f}"])
    print(f"{shape.count_parameters():,} parameters on {given.device}, torch {torch.__version__}")
    print(f"AdamW takes {statistics.median(plain) * 1e3:.1f} ms; ratios are medians of each turn's")
    print(align_table(rows, gap=2, right=range(1, 3)))


if __name__ == "__main__":
    main()
