"""The checks of benchmarks/gpu_check.py that compare what only a GPU runs with its plain form, and
the axes of a mesh, small."""

from __future__ import annotations

import importlib.util
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_job import (
    ROOT,
    Failed,
    Figures,
    Job,
    Skipped,
    compare,
    log_of,
    losses,
    metrics,
    train,
)
from benchmarks.gpu_mesh import AXES

if TYPE_CHECKING:
    from kempner.model.config import ModelConfig

STEPS = 5
EXPERTS = ("--model.n_experts=4", "--model.experts_per_token=2")
# What is trained on a mesh of two ranks beside the usual small model.
MESHES: dict[str, tuple[str, ...]] = {
    "dp_replicate": (),
    "tp": (),
    "cp": (),
    "pp": ("--train.micro_batch=2",),
    "ep": EXPERTS,
}


def meshes(job: Job) -> Figures:
    """Two processes make the groups of each axis as on GPUs, with gloo in the place of NCCL."""
    chosen = AXES[:1] if job.quick else AXES
    for axis in chosen:
        directory = job.work / f"mesh-{axis}"
        directory.mkdir()
        command = [sys.executable, "-m", "benchmarks.gpu_mesh"]
        words = str(directory), axis
        ranks = [subprocess.Popen([*command, rank, *words], cwd=ROOT) for rank in "01"]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise Failed(f"{axis}: the ranks that make its groups end with exit codes {codes}")
    return {"axes": " ".join(chosen)}


def axes(job: Job) -> Figures:
    """Steps of each axis over NCCL, with the losses of the run that check `save` has left; a
    pipeline saves and resumes."""
    if job.device == "cuda" and job.ranks < 2:
        raise Skipped("needs two GPUs")
    worst: Figures = {}
    length = (f"--train.max_steps={STEPS}", "--checkpoint.interval=0")
    for axis, options in MESHES.items():
        if job.quick and axis != "pp":
            continue
        words = job.words(f"two-{axis}", *options, f"--distributed.{axis}=2")
        if axis == "pp":
            train(job, [*words, "--train.max_steps=3", "--checkpoint.interval=3"], 2)
            if "continues after step 3" not in train(job, [*words, *length], 2):
                raise Failed("pp: the second start did not resume from the checkpoint")
        else:
            train(job, [*words, *length], 2)
        reference = "unbroken"
        if axis == "ep":  # another model
            train(job, job.words(reference := f"one-{axis}", *options, *length))
        found = losses(job.work / f"two-{axis}")
        worst[axis] = compare(axis, found, losses(job.work / reference))
    return worst


def offload(job: Job) -> Figures:
    """A run whose optimizer state, or activations, wait on the host has the losses of the run that
    check `save` has left, bit for bit."""
    steps = (f"--train.max_steps={STEPS}", "--checkpoint.interval=0", "--train.deterministic")
    levers = {"state": "--optimizer.cpu_offload", "activations": "--train.offload_activations=1"}
    expected = losses(job.work / "unbroken")
    for name, lever in levers.items():
        train(job, job.words(f"offload-{name}", lever, *steps))
        found = losses(job.work / f"offload-{name}")
        if len(found) != STEPS or any(found[n] != expected.get(n) for n in found):
            raise Failed(f"{lever}: the losses are not those without it")
    return {"equal_losses": STEPS}


# --- levers of speed: losses as without, and tokens/s with / without ---------------------------

PACKED = ("--data.document_mask", "--train.max_steps=30", "--checkpoint.interval=0")


LACKS = "is not installed|has no way to it|does not run|torch .* has no|cannot hide"


def beside(job: Job, name: str, without: tuple[str, ...], lever: str, ranks: int = 1) -> Figures:
    """Train without a lever and with it. Raises Skipped where a run refuses its words for want of
    what this machine lacks."""
    rates = {}
    for which, more in ((f"without-{name}", ()), (name, (lever,))):
        words = job.words(which, *without, *more)
        try:
            train(job, words, ranks)
        except Failed:
            text = log_of(job, words).read_text()
            if why := re.search(f".*({LACKS}).*", text):
                raise Skipped(why[0].strip()) from None
            raise
        # The first ten steps warm up: kernels are compiled, and memory is allocated.
        steps = metrics(job.work / which)[10:]
        rates[which] = statistics.median(line["tokens_per_s"] for line in steps)
    worst = compare(name, losses(job.work / name), losses(job.work / f"without-{name}"))
    return {f"{name} loss": worst, f"{name} speed": rates[name] / rates[f"without-{name}"]}


def skipping(kinds: Iterable[Callable[[], Figures]]) -> Figures:
    """The figures of those that this machine has; Skipped where it has none."""
    found: Figures = {}
    why = "needs two GPUs"
    for kind in kinds:
        try:
            found |= kind()
        except Skipped as skipped:
            why = str(skipped)
    if not found:
        raise Skipped(why)
    return found


def flash(job: Job) -> Figures:
    """FlashAttention 3 and 4, by length, and on two GPUs in a ring, beside FlashAttention 2."""
    plain = ("--train.attention=flash", *PACKED)
    ring = (*PACKED[1:], "--train.attention=flash", "--distributed.cp=2")
    kinds = [partial(beside, job, k, plain, f"--train.attention={k}") for k in ("fa3", "fa4")]
    if job.ranks > 1:
        kinds += [
            partial(beside, job, f"{k}-ring", ring, f"--train.attention={k}", 2)
            for k in ("fa3", "fa4")
        ]
    return skipping(kinds)


def overlap(job: Job) -> Figures:
    """Each value of distributed.overlap, on two GPUs."""
    tp = ("--train.compile", "--distributed.tp=2", *PACKED[1:])
    shared = (*EXPERTS, "--model.shared_experts=1", "--distributed.ep=2", "--experts.spare=1")
    runs = {"tp": tp, "reduce": PACKED[1:], "symm_mem": PACKED[1:], "shared": shared}
    kinds = [
        partial(beside, job, name, words, f"--distributed.overlap=['{name}']", 2)
        for name, words in (runs if job.ranks > 1 else {}).items()
    ]
    return skipping(kinds)


def exchange(job: Job) -> Figures:
    """Rows for experts in buffers, beside as many as there are."""
    if job.ranks < 2:
        raise Skipped("needs two GPUs")
    words = (*EXPERTS, "--distributed.ep=2", *PACKED[1:])
    return skipping([partial(beside, job, "buffers", words, "--experts.spare=1", 2)])


def fp8_gathers(job: Job) -> Figures:
    """FSDP's gathers in 8 bits beside products in 8 bits alone."""
    if importlib.util.find_spec("torchao") is None:
        raise Skipped("torchao is not installed: pip install -e '.[fp8]'")
    words = ("--train.fp8=tensorwise", "--train.compile", *PACKED[1:])
    ranks = 1 << (job.ranks.bit_length() - 1)  # the batch divides by powers of two
    lever = "--train.fp8=tensorwise_gather"
    return skipping([partial(beside, job, "fp8_gather", words, lever, ranks)])


# --- kernels, in this process -----------------------------------------------------------------


def difference(name: str, found: Any, expected: Any, most: float) -> float:
    """Of the norms, relative. Raises Failed over `most`, or where a number is not finite."""
    found, expected = found.float(), expected.float()
    relative = float((found - expected).norm() / expected.norm())
    if not relative < most:
        raise Failed(f"{name}: differs by {relative:.2%} from its plain form")
    return relative


class Ring:
    """Ranks of a ring, each a thread of this process: what a rank sends waits in a queue."""

    def __init__(self, size: int) -> None:
        self.ranks = size
        self.queues: dict[Any, queue.Queue[Any]] = {
            (rank, tag): queue.Queue() for rank in range(size) for tag in (0, 1)
        }

    class Group:
        def __init__(self, ring: Ring, number: int) -> None:
            self.ring, self.number = ring, number

        def rank(self) -> int:
            return self.number

        def size(self) -> int:
            return self.ring.ranks

    class Passing:
        def __init__(self, tensor: Any, group: Ring.Group, tag: int = 0) -> None:
            ring, self.number, self.tag = group.ring, group.number, tag
            ring.queues[(group.number + 1) % ring.ranks, tag].put(tensor.clone())
            self.ring = ring

        def wait(self) -> Any:
            return self.ring.queues[self.number, self.tag].get(timeout=60)


class Context:
    """What autograd would give to forward() and backward(), which wait for other ranks: it runs all
    backward passes of a GPU in one thread."""

    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def ring_attention(size: int, q: Any, k: Any, v: Any, dy: Any) -> list[Any]:
    """The output and the gradients of q, k and v, [B, heads, T, E] each, by the code of a ring of
    `size` ranks. Raises Failed."""
    import torch

    from kempner.parallel import context

    group, parts = (
        Ring(size),
        [context.rank_columns(q.shape[2], r, size, "ring", q.device) for r in range(size)],
    )
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        ctx, mine = Context(), parts[rank]
        with torch.no_grad():
            part = [x[:, :, mine].contiguous() for x in (q, k, v, dy)]
            out = context._Ring.forward(ctx, *part[:3], Ring.Group(group, rank))  # type: ignore[arg-type]
            found[rank] = [out, *context._Ring.backward(ctx, part[3])[:3]]

    # The code of the ring is the trainer's; only the messages are replaced.
    real, context._Passing = context._Passing, Ring.Passing  # type: ignore[misc,assignment]
    try:
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        context._Passing = real  # type: ignore[misc]
    if any(each is None for each in found):
        raise Failed("a rank of the ring failed; see the log")
    whole = [torch.empty_like(x) for x in (q, q, k, v)]
    for i, joined in enumerate(whole):
        for rank, mine in enumerate(parts):
            joined[:, :, mine] = found[rank][i]
    return whole


def waves(job: Job) -> Figures:
    """A save in waves, which another thread copies from the GPU: the bytes of one in one piece."""
    import torch

    from kempner.checkpoint.format.plan import make_table
    from kempner.checkpoint.format.waves import WavedImage
    from kempner.checkpoint.format.writer import WRITE, Image, plan_file

    device = torch.device("cuda:0" if job.device == "cuda" else "cpu")  # pinning wants the number
    state = {str(i): torch.randn(3 << 22, device=device) for i in range(4)}  # 192 MiB
    plan = plan_file(make_table(state, {}, world=1), 0)
    gpu = device if device.type == "cuda" else None
    images, found = (Image(plan, gpu, print), WavedImage(plan, gpu, print, WRITE)), list[bytes]()

    def join(image: Image) -> None:
        found.append(b"".join(bytes(piece) for piece in image.pieces()))

    for image in images:
        image.stage(state)
        read = threading.Thread(target=join, args=(image,))
        read.start()
        read.join()
        image.close()
    if len(found) != 2 or found[0] != found[1]:
        raise Failed("the file made in waves has other bytes than the one in one piece")
    return {"waves": images[1].waves}


def ring(job: Job) -> Figures:
    """Ring attention of four ranks, emulated here: output and gradients are those of one rank."""
    import torch

    from kempner.model.attention import Visible, attend

    size, length, width = 4, 64 if job.quick else 1024, 64
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, dy = (
        torch.randn(2, heads, length, width, device=job.device, dtype=dtype)
        for heads in (4, 2, 2, 4)
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attend(*whole, Visible(None))
    expected = [y.detach(), *torch.autograd.grad(y, whole, dy)]
    found = ring_attention(size, q, k, v, dy)
    most, figures = 2e-2 if job.device == "cuda" else 1e-5, {}
    for name, ours, plain in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        figures[name] = difference(name, ours, plain, most)
    return figures


def experts(job: Job) -> Figures:
    """Grouped products, also of experts without a token, against a loop; the gradients of those are
    exactly 0. Rows after the last expert's, which are NaN here, change nothing."""
    import torch

    from kempner.model.moe import one_by_one, through_experts

    torch.manual_seed(0)
    load, inner, outer = [5, 0, 7, 0], 64, 128
    rows, spare = sum(load), 20
    made = [(rows + spare, outer), (4, inner, outer), (4, outer, inner), (4, inner, outer)]
    tensors = [torch.randn(shape, device=job.device, dtype=torch.bfloat16) * 0.1 for shape in made]
    # NaN shows whether any product reads them.
    tensors[0][rows:] = float("nan")
    counts = torch.tensor(load, device=job.device)
    results = []
    for product in (through_experts, one_by_one):
        leaves = [x.clone().requires_grad_() for x in tensors]
        y = product(leaves[0], counts, *leaves[1:])[:rows]
        dx, *others = torch.autograd.grad(y.float().square().sum(), leaves)
        results.append([y.detach(), dx[:rows], *others])
    names = ("output", "dx", "dw1", "dw2", "dw3")
    figures = {
        name: difference(name, a, b, 2e-2) for name, a, b in zip(names, *results, strict=True)
    }
    idle = [float(grad[1::2].abs().max()) for grad in results[0][2:]]
    if any(idle):
        raise Failed(f"experts without a token have gradients: {idle}")
    return figures


def muon(job: Job) -> Figures:
    """Newton-Schulz in bf16 against fp32."""
    import torch

    from kempner.optim.muon import orthogonalise

    torch.manual_seed(0)
    size = 64 if job.quick else 1024
    matrix = torch.randn(size, 2 * size, device=job.device)
    found = orthogonalise(matrix.bfloat16())
    return {"difference": difference("orthogonalise", found, orthogonalise(matrix), 5e-2)}


def update(job: Job) -> Figures:
    """Weights and moments in bf16: the compiled update against the eager one."""
    import torch
    from torch import nn

    from kempner.optim.build import build_optimizer
    from kempner.optim.config import OptimizerConfig

    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(256, 128, device=job.device, dtype=torch.bfloat16)
        optimizer = build_optimizer(model, OptimizerConfig(moments="bf16"))
        if compiled and not optimizer.compiled:
            raise Failed("the update is not compiled: there is no C compiler, or no Python.h")
        optimizer.compiled = compiled
        for _ in range(STEPS):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(model.weight.detach())
    same = float((results[0] == results[1]).float().mean())
    difference("the update", *results, 2e-3)
    return {"equal_weights": same}


def loss(job: Job) -> Figures:
    """A pass of 1b: the compiled loss against the eager one, loss and gradients; time and memory of
    both."""
    import torch

    from kempner.model.loss import chunk_loss, cross_entropy

    torch.manual_seed(0)
    tokens, words, width = (512, 4096, 64) if job.quick else (16384, 128_256, 2048)
    made = [(tokens, width), (words, width)]
    leaves = [torch.randn(shape, device=job.device, dtype=torch.bfloat16) / 8 for shape in made]
    targets = torch.randint(words, (tokens,), device=job.device)
    results, figures = [], {}
    for name, compiled in {"eager": None, "compiled": torch.compile(chunk_loss)}.items():
        inputs = [x.clone().requires_grad_() for x in leaves]
        for _ in range(3):  # the first compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.synchronize()
            began = time.perf_counter()
            total, _ = cross_entropy(*inputs, targets, compiled=compiled)
            found = [total.detach(), *torch.autograd.grad(total, inputs)]
            torch.cuda.synchronize()
            figures[f"{name}_ms"] = 1e3 * (time.perf_counter() - began)
        figures[f"{name}_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        results.append(found)
    for what, ours, plain in zip(("loss", "dx", "dw"), *reversed(results), strict=True):
        figures[what] = difference(f"compiled {what}", ours, plain, 1e-2)
    return figures


def decoding(job: Job) -> Figures:
    """Models of 1.2 and 6.7 billion parameters draw tokens, one graph a step, and those of steps
    without; their speed beside that of reading weights and keys once for each token."""
    import torch

    from kempner.model.config import ModelConfig

    width, layers, words = (256, 2, 512) if job.quick else (2048, 16, 128_256)
    shapes = {
        "": ModelConfig(
            vocab_size=words, dim=width, n_layers=layers, n_heads=width // 32,
            n_kv_heads=width // 128, ffn_dim=4 * width, max_seq_len=1024, tie_embeddings=True,
        )
    }  # fmt: skip
    if job.device == "cuda" and torch.cuda.mem_get_info()[0] > 30e9:
        shapes["7b_"] = ModelConfig(
            vocab_size=32_000, dim=4096, n_layers=32, n_heads=32, ffn_dim=11_008, max_seq_len=1024
        )
    rate = copy_rate(job.device, 1 << (20 if job.quick else 30))
    found: Figures = {}
    for name, cfg in shapes.items():
        found |= {name + key: value for key, value in decode(job, cfg, rate).items()}
    return found


def decode(job: Job, cfg: ModelConfig, rate: float) -> dict[str, float]:
    """Draw 128 tokens, one a step, without graphs, with them, and compiled. `rate`: of a copy,
    bytes/s."""
    import torch

    from kempner.extensions.generate.config import Sampling
    from kempner.extensions.generate.engine import Engine, GenerationRequest
    from kempner.model.decoder import Decoder

    gpu = job.device == "cuda"
    torch.manual_seed(0)
    with torch.device(job.device):
        model = Decoder(cfg).cast(torch.bfloat16 if gpu else torch.float32)
    model.eval().requires_grad_(False)
    count, texts, times = 128, [], []
    kinds = [(False, False), (True, False), (True, True)]
    for graphs, compiled in kinds if gpu else kinds[:2]:
        engine = Engine[GenerationRequest](model, cfg.vocab_size, 512, 1, compiled=compiled)
        request = GenerationRequest(0, [1] * 64, Sampling(temperature=0, max_tokens=count))
        engine.join([request])
        engine.step()
        step = engine._token_step
        assert step is not None
        step.uses_graphs = graphs and gpu
        seconds = []
        while len(request.new) < count:
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)  # tokens are on the host by now
        texts.append(request.new)
        times.append(statistics.median(seconds))
        captured = [*step.by_shape.values(), *step.draws.values()]
        if graphs and gpu and any(each.graph is None for each in captured):
            raise Failed("torch cannot capture a step as a graph")
    # Later on the order of sums, which differs, may decide between two tokens of a random model.
    equal = next(
        (n for n, pair in enumerate(zip(*texts[:2], strict=True)) if len({*pair}) > 1), count
    )
    if equal < 4:
        raise Failed(f"a graph draws other tokens: {texts[1][:9]}..., not {texts[0][:9]}...")
    heads = 2 * cfg.n_layers * cfg.kv_heads * cfg.resolved_head_dim
    keys = heads * (64 + count // 2) * model.embed.weight.itemsize
    # Of an embedding of its own, a step reads one row.
    unread = 0 if cfg.tie_embeddings else model.embed.weight.nbytes
    moved = sum(p.nbytes for p in model.parameters()) - unread + keys
    return {
        "equal_tokens": equal,
        "tokens_per_s": 1 / times[1],
        "share_of_a_copys_rate": moved / times[1] / rate,  # target on a GPU: 0.75
        **({"compiled_share_of_it": moved / times[2] / rate} if gpu else {}),
    }


def copy_rate(device: str, size: int) -> float:
    """Bytes a second that a copy in the device's memory reads and writes, the best of ten."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(10):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def generation(job: Job) -> Figures:
    """32 tokens of the run that check `save` has left, and the time of each."""
    from kempner.extensions.generate.config import Sampling
    from kempner.extensions.generate.engine import Engine, GenerationRequest
    from kempner.extensions.generate.load import load_model_and_tokenizer

    loaded = load_model_and_tokenizer(str(job.work / "unbroken"), job.device)
    engine = Engine[GenerationRequest](
        loaded.model, loaded.words.tokenizer.vocab_size, loaded.window, 1
    )
    request = GenerationRequest(
        0, [*loaded.words.begin, *b"def "], Sampling(temperature=0, max_tokens=32)
    )
    seconds = []
    while len(request.new) < 32:
        began = time.perf_counter()
        if engine.requests:
            engine.step()
        else:
            engine.join([request])
        seconds.append(time.perf_counter() - began)  # tokens are on the host by now
    later = sorted(seconds[8:])
    return {
        "tokens": len(request.new),
        "first_ms": 1e3 * seconds[0],
        "ms_per_token": 1e3 * later[len(later) // 2],
        "slowest_ms": 1e3 * later[-1],
    }
