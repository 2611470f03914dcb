"""The policy-gradient loss on sampled tokens: makes each more likely by its advantage.

The ratio r of a token is its probability under the trained model, at the sampler's temperature,
over the probability that the sampler reported, which belongs to the distribution it was drawn from.
If top_p, top_k or min_p left tokens out, the others have their share there but not here, and r is
below 1 by that factor. It is still the importance-sampling weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.extensions.rl.config import LossConfig, SamplingConfig
from kempner.extensions.rl.trainer.batch import Rollouts
from kempner.model.decoder import Decoder
from kempner.model.loss import VocabularyPart, cross_entropy
from kempner.parallel.layout import Layout

if TYPE_CHECKING:
    from kempner.train.sections import RunConfig

BOUND = 20.0  # of log ratios: exp(BOUND), times any advantage and squared, is finite even in bf16
LOWEST = -1e4  # log-probabilities: the difference of two infinite ones is NaN
SUMS = ("mismatch_sum", "fresh_sum", "fresh_tokens", "held_back", "kl_sum")


def policy_losses(
    cfg: LossConfig, new: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of tokens with these log-probabilities, `new` of the model, `old` of the
    sampler; the log ratios; and a mask of the tokens that a bound holds back, so that they do not
    push the model. All [...], fp32.

    grpo (arXiv:2402.03300) and dapo (arXiv:2503.14476) clip the ratio, with two bounds, and differ
    only in their advantages; for negative advantages `dual_clip` bounds it from above
    (arXiv:1912.09729). tis weighs the gradient of the log-probability by the ratio, truncated at
    `is_cap`, as in arXiv:2506.13585. masked also drops tokens whose probability has moved by more
    than `mask` in the direction of the advantage.
    """
    # The outer clamp has slope 0 past BOUND, so that such a token does not push.
    log_ratio = (new.clamp(min=LOWEST) - old.clamp(min=LOWEST)).clamp(-BOUND, BOUND)
    if cfg.name in ("tis", "masked"):
        gain = truncated_ratio(log_ratio, cfg.is_cap) * advantages
        clip_mask = log_ratio > math.log(cfg.is_cap)
        if cfg.name == "masked":
            clip_mask = (new.exp() - old.exp()) * advantages.sign() > cfg.mask
            # Not a product with the mask: 0 times infinity is NaN.
            gain = torch.where(clip_mask, 0.0, gain)
    else:
        ratio = log_ratio.exp()
        gain = ratio * advantages
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
        bounded = (advantages < 0) & (ratio > cfg.dual_clip)
        clip_mask = (clipped < gain) | bounded
        gain = torch.where(bounded, cfg.dual_clip * advantages, torch.minimum(gain, clipped))
    return cfg.kl * log_ratio.square() - gain, log_ratio, clip_mask


def truncated_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """Return exp(log_ratio) up to `cap`, and above it a line with that slope: its derivative is
    min(ratio, cap), which weighs the gradient of the log-probability."""
    most = math.log(cap)
    return log_ratio.clamp(max=most).exp() + cap * (log_ratio - most).clamp(min=0)


class Policy:
    """The objective (kempner.train.objective) for tokens with advantages."""

    counted = "loss_tokens"

    def __init__(self, cfg: RunConfig, device: torch.device) -> None:
        self._cfg, self._temperature = cfg.of(LossConfig), cfg.of(SamplingConfig).temperature
        self._chunk = cfg.train.loss_chunk
        self._batch: Rollouts | None = None
        # On the device, because reading a number in each micro-batch would wait for the GPU.
        self._sums = torch.zeros(len(SUMS), device=device)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
        assert isinstance(batch, Rollouts)
        self._batch = batch  # not passed on by the model to its loss
        loss, terms = model(batch.inputs, batch.targets, batch.documents, token_losses=True)
        return loss, terms, batch

    def numbers(self) -> dict[str, Tensor]:
        """Return the numbers since the last call, over the tokens that count: the sum of |log
        ratio|; its part from tokens that the newest weights sampled, and their number; tokens that
        a bound has held back; and the divergence of model and sampler."""
        sums = self._sums.clone()
        self._sums.zero_()
        return dict(zip(SUMS, sums.unbind(), strict=True))

    def record(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Compute means over the tokens that count."""
        tokens, fresh = max(1.0, values["tokens"]), values["fresh_tokens"]
        distance = {  # "drift": the sampling weights no longer exist
            "mismatch": (values["fresh_sum"], fresh),
            "drift": (values["mismatch_sum"] - values["fresh_sum"], values["tokens"] - fresh),
        }
        return {
            **{name: total / count for name, (total, count) in distance.items() if count},
            "ratio_clipped": values["held_back"] / tokens,
            "kl": values["kl_sum"] / tokens,
        }

    def loss(
        self, x: Tensor, weight: Tensor, targets: Tensor, part: VocabularyPart | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the loss in place of loss.cross_entropy."""
        judge = self._judge(targets)
        return cross_entropy(x, weight, targets, self._chunk, part, self._temperature, judge)

    def _judge(self, targets: Tensor) -> Callable[[Tensor, slice], tuple[Tensor, Tensor]]:
        assert self._batch is not None
        flat = (self._batch.logprobs, self._batch.advantages, self._batch.fresh, targets != IGNORE)
        columns = [tensor.flatten().unsqueeze(1) for tensor in flat]
        first = None
        if self._batch.own is not None:
            first = torch.zeros(self._batch.targets.shape[1], device=targets.device)
            self._batch.own.append(first)

        def judge(losses: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            old, advantages, fresh, counts = (tensor[rows] for tensor in columns)
            # Called in the forward() of an autograd.Function, where gradients are off.
            with torch.enable_grad():
                losses = losses.detach().requires_grad_()
                ours, log_ratio, clip_mask = policy_losses(self._cfg, -losses, old, advantages)
                (slopes,) = torch.autograd.grad(ours.sum(), losses)
            if first is not None:
                # `first` is the first row: for a chunk of later rows this is empty.
                there = first[rows.start : rows.stop]
                there.copy_(-losses.detach()[: len(there), 0])
            distance = log_ratio.detach().abs()
            # Its mean over the sampler's samples is KL(sampler, model), and it is never negative.
            # expm1(): in fp32, exp(x) - 1 keeps few digits for small x.
            kl = log_ratio.detach().expm1() - log_ratio.detach()
            mine = (distance, distance * fresh, fresh.float(), clip_mask.float(), kl)
            for i, values in enumerate(mine):
                self._sums[i] += torch.where(counts, values, 0.0).sum()
            return ours.detach(), slopes

        return judge


def open_policy(cfg: RunConfig, layout: Layout, model: Decoder, device: torch.device) -> Policy:
    policy = Policy(cfg, device)
    model.loss = policy.loss
    if layout.tp is not None:
        from kempner.parallel.tensor import VocabularyLoss

        model.loss = VocabularyLoss(policy.loss, layout.tp)
    return policy
