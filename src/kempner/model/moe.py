"""A mixture of experts in place of the feed-forward layer: a router sends each token through a few
of many SwiGLU layers (arXiv:2101.03961). No token is dropped, however uneven the load is.

Shapes: B rows, T tokens a row, N = B T, D width, F width of an expert, E experts, K experts of a
token, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model.config import ModelConfig
from kempner.model.feed_forward import FeedForward

GROUPED_MM = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.10
ALIGNED = 8  # bf16 elements, 16 bytes: row sizes must be multiples of this
CLEARS_IDLE = [True]  # is an idle expert's gradient 0? choose_products() finds out


class Routing(NamedTuple):
    """Expert usage in one layer."""

    load: Tensor  # int64 [E]: tokens that each expert got
    balance: Tensor | None  # fp32 [B]: the auxiliary loss of each row; None without one
    log_z_squares: Tensor | None  # fp32 [B, T]: the z-loss of each token; None without one


class MixtureOfExperts(nn.Module):
    """A layer of routed experts. Returns its output [B, T, D] and its Routing.

    The router's scores are a softmax over the experts or a sigmoid of each. The K highest, plus
    `router_bias` if there is one, choose a token's experts; the scores alone, without the bias,
    weigh their outputs (arXiv:2408.15664).
    """

    router_bias: Tensor | None

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.router = ExpertRouter(cfg.dim, cfg.n_experts, bias=False)
        # A buffer, not a parameter: it has no gradient, and FSDP neither shards nor rounds it.
        bias = torch.zeros(cfg.n_experts) if cfg.router_bias else None
        self.register_buffer("router_bias", bias)
        self.experts = Experts(cfg)
        width = cfg.shared_experts * cfg.ffn_dim
        self.shared = FeedForward(cfg.dim, width) if width else None
        self.hides_shared = False  # `shared` is computed while parallel/experts.py sends rows

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        scores, expert_ids, weights, squares = self.route(x)
        load, order, place = sort_by_expert(expert_ids, self.cfg.n_experts)
        rows = take_rows(x.flatten(0, 1), order, place, self.cfg.experts_per_token)  # [N K, D]
        shared: Tensor | None = None
        if self.shared is not None and self.hides_shared:
            y, shared = self.experts(rows, load, partial(self.shared, x))
        else:
            y = self.experts(rows, load)  # [N K, D]
        y = take_rows(y, place, order).view(*expert_ids.shape, -1)  # [B, T, K, D]
        y = (y * weights.unsqueeze(-1).to(y.dtype)).sum(2)
        if self.shared is not None:
            y = y + (self.shared(x) if shared is None else shared)
        balance = balance_loss(scores, expert_ids) if self.cfg.aux_loss else None
        return y, Routing(load, balance, squares)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Route x [B, T, D]. Returns the scores, fp32 [B, T, E]; the chosen experts, int64 [B, T,
        K]; the weights of their outputs, fp32 [B, T, K]; and with a z-loss its value for each
        token, fp32 [B, T]: log^2 Z of the router's logits (ST-MoE, arXiv:2202.08906, eq. 5)."""
        cfg, logits = self.cfg, self.router(x)
        scores = logits.softmax(-1) if cfg.router == "softmax" else logits.sigmoid()
        ranked = scores if self.router_bias is None else scores.detach() + self.router_bias
        expert_ids = ranked.topk(cfg.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, expert_ids)
        if cfg.router_normalize:
            # Sigmoids may all be 0 in fp32; DeepSeek-V3's code adds the same amount.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        squares = logits.logsumexp(-1).square() if cfg.router_z_loss else None
        return scores, expert_ids, weights * cfg.router_scale, squares


class ExpertRouter(nn.Linear):
    """A linear layer from x [..., D] to logits [..., E], in fp32 whatever the model's
    dtype: in bf16, with 128 experts, one token in 25 would get other experts, and 7 % tie
    for the last place."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = _Fp32Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return logits


class _Fp32Product(torch.autograd.Function):
    """The product x W^T in fp32. Autograd would keep an fp32 copy of x for the backward pass;
    this keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2).float()
        of_weight = grad.flatten(0, -2).t() @ rows
        return (grad @ weight.float()).to(x.dtype), of_weight.to(weight.dtype)


class Experts(nn.Module):
    """Stacked SwiGLU layers: expert e is (w1[e], w2[e], w3[e])."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        inner, outer = (cfg.n_experts, cfg.ffn_dim, cfg.dim), (cfg.n_experts, cfg.dim, cfg.ffn_dim)
        self.w1 = nn.Parameter(torch.empty(inner).normal_(std=cfg.init_std))  # gate
        self.w3 = nn.Parameter(torch.empty(inner).normal_(std=cfg.init_std))  # up
        self.w2 = nn.Parameter(torch.empty(outer).normal_(std=cfg.init_std))  # down

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        """Send x [M, D] through the experts: first the load[0] tokens of expert 0, then those of
        expert 1, and so on. Rows after the last token are padding; their outputs are arbitrary."""
        return through_experts(x, load, self.w1, self.w2, self.w3)


def through_experts(x: Tensor, load: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Send x [M, D] through the experts with these weights, load[e] rows through expert e."""
    if not has_grouped_mm(x, w1):
        return one_by_one(x, load, w1, w2, w3)
    if not CLEARS_IDLE[0]:
        # Only if the kernel leaves garbage: the mask costs a pass over all experts' gradients.
        w1, w2, w3 = (_ClearIdle.apply(w, load) for w in (w1, w2, w3))  # type: ignore[no-untyped-call]
    # On the device, where the kernel finds the groups.
    ends = load.cumsum(0).int()
    gate = grouped_mm(x, w1, ends)  # [M, F]
    return grouped_mm(F.silu(gate) * grouped_mm(x, w3, ends), w2, ends)


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch can multiply each group of rows of x by its expert's matrix. On GPUs of
    compute capability 9.0 and later this is one kernel, and the host need not know the load;
    elsewhere it is a loop in torch. bf16 only: torch 2.13 cannot compile it in fp32, because its
    meta function takes no other dtype. Rows must be aligned."""
    if x.dtype != torch.bfloat16 or any(size % ALIGNED for size in weight.shape[1:]):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [M, A] that end at ends[e] by weight[e].T; weight [E, B,
    A]: [M, B]."""
    y: Tensor = GROUPED_MM(x, weight.transpose(1, 2), offs=ends)
    return y


class _ClearIdle(torch.autograd.Function):
    """Identity on weights [E, ...] whose gradient is 0 for experts without tokens, whatever the
    kernel leaves there."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (load,) = ctx.saved_tensors
        return grad.masked_fill((load == 0).view(-1, 1, 1), 0.0), None


@torch.enable_grad()
def choose_products(dtype: torch.dtype, device: torch.device) -> str:
    """Find out, once per process, whether grouped_mm gives experts without tokens the gradient 0.
    Returns how experts are multiplied with activations of `dtype`, if their matrices are aligned.

    On Blackwell it is the accumulator's previous contents (pytorch#172439, NVIDIA/cutlass#2674):
    finite, so that no check of the step sees it, and it enters the optimizer's moments.
    """
    x = torch.ones(12, 64, dtype=dtype, device=device)
    weight = torch.ones(4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    if not has_grouped_mm(x, weight):
        return "one by one"
    idle = [1, 3]
    CLEARS_IDLE[0] = True
    # Twice: the accumulator may happen to hold 0 before the first product.
    for _ in range(2):
        load = torch.tensor([5, 0, 7, 0], device=device)
        y = grouped_mm(x, weight, load.cumsum(0).int())
        (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        CLEARS_IDLE[0] &= not grad[idle].any()
    if CLEARS_IDLE[0]:
        return "grouped"
    return "grouped; its gradient of an idle expert is not 0 on this device, and is set to 0"


def one_by_one(x: Tensor, load: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Do the same as through_experts() in a loop over the experts."""
    # The host waits here: it needs these numbers to split the rows.
    loads = load.tolist()
    *parts, rest = torch.split(x, [*loads, len(x) - sum(loads)])
    weights = zip(parts, w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat(
        [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, down, up in weights
        ]
        + [torch.zeros_like(rest)]
    )


def sort_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the load [E], the order [N K] that sorts chosen [B, T, K] by expert, and its inverse.
    Deterministic: no atomic addition."""
    # Count in the sorted list: torch.bincount makes the host wait for the largest number.
    flat = expert_ids.flatten()
    ranked, order = flat.sort(stable=True)
    edges = torch.arange(experts + 1, device=flat.device)
    return torch.searchsorted(ranked, edges).diff(), order, order.argsort()


def take_rows(x: Tensor, index: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Gather rows of x [N, D]: row index[i] // copies for each i, [N K, D]. `copies` = K: each
    token appears K times. `inverse`: the inverse permutation of `index`."""
    rows: Tensor = _TakeRows.apply(x, index, inverse, copies)  # type: ignore[no-untyped-call]
    return rows


class _TakeRows(torch.autograd.Function):
    """A gather whose gradient is a gather by the inverse. Plain indexing adds its gradient row by
    row: slowly, or in a varying order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(inverse)
        return x[index // copies if copies > 1 else index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad[inverse]
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[-1]).sum(1)
        return grad, None, None, None


def balance_loss(scores: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the auxiliary loss of each row, [B]: 1 if all experts are used
    equally, otherwise more.

    sum over e of f_e P_e, f_e = E / (K T) times the tokens that chose e, P_e the mean share of e in
    a token's scores (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20). Computed per row, so that it
    depends neither on the micro-batch nor on the number of ranks.
    """
    rows, _, experts = scores.shape
    # Shares add up to 1 for sigmoids, too, as for a softmax; sigmoids may all be 0 in fp32.
    shares = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(1)  # [B, E]
    flat = expert_ids.flatten(1)  # [B, T K]
    counts = torch.zeros(rows, experts, device=flat.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))  # whole numbers: exact
    return (counts * shares).sum(1) * experts / flat.shape[1]


class Routings:
    """Expert usage in all layers since the last take()."""

    def __init__(self, cfg: ModelConfig) -> None:
        self._numbers = cfg.mixtures
        self._layers, self._experts = len(cfg.mixtures), cfg.n_experts
        self._coefficients = {"aux_loss": cfg.aux_loss, "router_z_loss": cfg.router_z_loss}
        self.copies = 1  # ranks with the same tokens, whose gradients are summed
        self.scale = 1.0  # derivative of the step's objective by the sum of its losses
        self._load: Tensor | None = None
        self._losses: dict[str, Tensor] = {}
        self.step_load: Tensor  # [L, E]: of the last step, over all ranks
        self.buffers: Any = None  # parallel/experts.py: ExchangeBuffers of this model
        # This rank's rows that had no place in the buffers, int64 []. Kept until the host learns of
        # it, a step later: no update may come in between.
        self.rows_over: Tensor | float = 0.0

    def add(self, layers: Sequence[Routing], targets: Tensor, first: int = 0) -> Tensor | float:
        """Add one micro-batch with int64 targets [B, T]. Returns a term for its loss sum: of value
        0, but with the gradient of the auxiliary loss and the z-loss of these layers. `first`:
        number of the first block of a pipeline stage; layers of other stages count 0."""
        load = torch.stack([layer.load for layer in layers])
        if self.buffers is not None:
            self.rows_over = self.rows_over + self.buffers.rows_over(load)
        # From the block's number to its number among blocks with experts.
        first = sum(number < first for number in self._numbers)
        load = F.pad(load, (0, 0, first, self._layers - first - len(layers)))
        self._load = load if self._load is None else self._load + load
        # Weight each row by its number of targets: then the mean over a step's targets is the mean
        # of the rows, however they are spread over micro-batches and ranks.
        counts = targets >= 0
        change: Tensor | float = 0.0
        tensors: dict[str, list[Tensor]] = {
            "aux_loss": [layer.balance for layer in layers if layer.balance is not None],
            "router_z_loss": [
                layer.log_z_squares for layer in layers if layer.log_z_squares is not None
            ],
        }
        for name, values in tensors.items():
            if not values:
                continue
            total = (torch.stack(values).sum(0).view(len(counts), -1) * counts).sum()
            mean = total.detach() / self._layers
            self._losses[name] = self._losses[name] + mean if name in self._losses else mean
            change = change + self._coefficients[name] / self.copies * total
        # The recorded loss stays that of the tokens: x - x.detach() is 0 with the gradient of x.
        return change - change.detach() if isinstance(change, Tensor) else 0.0

    def repeat(self) -> int:
        """Forget the rows that had no place, because their step is repeated; returns the number of
        steps from then on without buffers."""
        self.rows_over = 0.0
        steps: int = self.buffers.pause()
        return steps

    def take(self, device: torch.device | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's numbers since the last call and reset them: the load, fp64 [L, E], and
        each loss that has a coefficient, by name (mean over the layers, sum over the tokens), fp32
        []. Zeros on `device` if a pipeline stage has no experts."""
        none = torch.zeros(self._layers, self._experts, device=device)
        load, losses = (none if self._load is None else self._load).double(), self._losses
        self._load, self._losses = None, {}
        return load, {
            name: losses.get(name, load.new_zeros(()))
            for name, coefficient in self._coefficients.items()
            if coefficient
        }


def with_loss(x: Tensor, loss: Tensor | float, scale: float) -> Tensor:
    """Return x with a loss [] attached that nothing else differentiates: the backward pass gives it
    the gradient `scale`. Only the last stage of a pipeline has a loss sum; the others use this."""
    if not isinstance(loss, Tensor):
        return x
    y: Tensor = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return y


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = loss.new_full((), scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.scale, None
