"""The shape of the model, and derived numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kempner.config.option import option
from kempner.config.values import format_value

ROUTERS = ("softmax", "sigmoid")
# Training options: they do not change which weights fit.
OF_TRAINING = ("init_std", "router_bias_speed", "aux_loss", "router_z_loss")
# Options that a longer context changes; no weight shape depends on them.
OF_CONTEXT = (
    "max_seq_len", "sliding_window", "rope_theta", "rope_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_original_len",
)  # fmt: skip
WITHOUT_EXPERTS = (
    "shared_experts", "router", "router_normalize", "router_scale", "router_bias", "aux_loss",
    "router_z_loss", "moe_frequency", "dense_ffn_dim",
)  # fmt: skip  # no effect


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = option(
        257, "embedding rows; at least the tokenizer's vocabulary", minimum=1, maximum=2**24
    )
    dim: int = option(256, "model width (residual stream)", minimum=1, maximum=2**18)
    n_layers: int = option(4, "number of transformer blocks", minimum=1, maximum=4096)
    n_heads: int = option(4, "query heads", minimum=1, maximum=2**14)
    n_kv_heads: int | None = option(
        None, "key-value heads (grouped-query attention); unset: n_heads", minimum=1, maximum=2**14
    )
    head_dim: int | None = option(
        None, "dimension of each head; unset: dim / n_heads", minimum=2, maximum=2**14
    )
    ffn_dim: int = option(
        768,
        "hidden width of the SwiGLU feed-forward layer, or of each expert",
        minimum=1,
        maximum=2**20,
    )
    n_experts: int = option(
        0, "experts in place of a feed-forward layer; 0: none", minimum=0, maximum=2**14
    )
    experts_per_token: int = option(
        2, "routed experts that each token goes through", minimum=1, maximum=2**10
    )
    moe_frequency: int = option(
        1,
        "every n-th block has experts, the others have a feed-forward layer; 1: all have experts",
        minimum=1,
        maximum=4096,
    )
    dense_ffn_dim: int | None = option(
        None,
        "hidden width of the feed-forward layers in blocks without experts; unset: ffn_dim",
        minimum=1,
        maximum=2**20,
    )
    shared_experts: int = option(
        0, "additional experts that every token goes through", minimum=0, maximum=2**10
    )
    router: str = option(
        "softmax", "scores of the experts: softmax over all, or sigmoid of each", choices=ROUTERS
    )
    router_normalize: bool = option(
        True, "divide the scores of a token's experts by their sum to weight their outputs"
    )
    router_scale: float = option(
        1.0, "factor of the output of a token's experts, without the shared ones", minimum=0.0
    )
    router_bias: bool = option(
        False, "balance the experts by a bias that is added to their scores for the choice only"
    )
    router_bias_speed: float = option(
        0.001, "change of each bias after a step, towards equal load", minimum=0.0
    )
    aux_loss: float = option(
        0.0, "coefficient of the auxiliary loss that balances the experts", minimum=0.0
    )
    router_z_loss: float = option(
        0.0, "coefficient of the z-loss of the routers, which keeps their logits small", minimum=0.0
    )
    max_seq_len: int = option(
        2048, "longest sequence that the model supports", minimum=1, maximum=2**24
    )
    norm_eps: float = option(1e-5, "epsilon of RMSNorm", minimum=0.0)
    qk_norm: bool = option(False, "apply RMSNorm to queries and keys, per head (Qwen3)")
    post_norms: bool = option(
        False, "apply RMSNorm also to what attention and feed-forward layer return (Gemma 2)"
    )
    qkv_bias: bool = option(False, "biases of the query, key and value projections (Qwen2)")
    sliding_window: int | None = option(
        None,
        "keys that a query sees, including its own (Mistral); unset: all up to its own",
        minimum=1,
    )
    attention_softcap: float | None = option(
        None,
        "attention scores s become softcap * tanh(s / softcap) (Gemma 2); unset: no cap",
        minimum=1e-3,
    )
    tie_embeddings: bool = option(False, "share the embedding's weight with the output layer")
    init_from: str | None = option(
        None,
        "start from these weights: a directory in Hugging Face format, a hub id, or RUN[@STEP]; "
        "they also set the shape",
    )
    init_std: float = option(0.02, "standard deviation of the initial weights", minimum=0.0)
    rope_theta: float = option(10000.0, "RoPE base frequency", minimum=1.0)
    rope_factor: float = option(
        1.0, "Llama 3 RoPE scaling of long wavelengths; 1: none", minimum=1.0
    )
    rope_low_freq_factor: float = option(
        1.0, "Llama 3: wavelengths above rope_original_len / this are scaled", minimum=0.0
    )
    rope_high_freq_factor: float = option(
        4.0, "Llama 3: wavelengths below rope_original_len / this are kept", minimum=0.0
    )
    rope_original_len: int = option(8192, "Llama 3: sequence length before RoPE scaling", minimum=1)

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def resolved_head_dim(self) -> int:
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def shape(self) -> dict[str, Any]:
        """Fields that must be equal for one model to load another's weights."""
        values = asdict(self) | {"n_kv_heads": self.kv_heads, "head_dim": self.resolved_head_dim}
        return {
            key: value
            for key, value in values.items()
            if key not in ("init_from", "max_seq_len", *OF_TRAINING)
        }

    @property
    def router_is_blind(self) -> bool:
        """True if the loss does not depend on the router's scores: normalised over one expert, s /
        s is 1."""
        return self.n_experts > 1 and self.experts_per_token == 1 and self.router_normalize

    @property
    def mixtures(self) -> list[int]:
        """Indices of the blocks with experts: the last of every moe_frequency blocks,
        as in Qwen3-MoE."""
        if not self.n_experts:
            return []
        return list(range(self.moe_frequency - 1, self.n_layers, self.moe_frequency))

    @property
    def dense_width(self) -> int:
        """Hidden width of the feed-forward layers in blocks without experts."""
        return self.ffn_dim if self.dense_ffn_dim is None else self.dense_ffn_dim

    def problems(self) -> list[str]:
        problems = []
        if self.n_heads % self.kv_heads:
            problems.append(
                f"model.n_kv_heads = {self.kv_heads}: must divide n_heads = {self.n_heads}"
            )
        if self.head_dim is None and self.dim % self.n_heads:
            problems.append(
                f"model.dim = {self.dim}: must be a multiple of "
                f"n_heads = {self.n_heads}, or set model.head_dim"
            )
        elif self.resolved_head_dim % 2:
            problems.append(
                f"model.head_dim = {self.resolved_head_dim}: must be even (RoPE turns pairs)"
            )
        if self.rope_factor > 1 and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            problems.append("model.rope_high_freq_factor: must exceed rope_low_freq_factor")
        return problems + self._expert_problems()

    def _expert_problems(self) -> list[str]:
        if self.n_experts:
            problems = []
            if self.experts_per_token > self.n_experts:
                problems.append(
                    f"model.experts_per_token = {self.experts_per_token}: at most n_experts = "
                    f"{self.n_experts}"
                )
            if self.router_is_blind and self.init_from is None:
                problems.append(
                    "model.experts_per_token = 1 with router_normalize: the weight of the one "
                    "expert is always 1, so that the loss has no gradient for the router; give "
                    "--no-model.router_normalize, or at least 2 experts_per_token"
                )
            if self.moe_frequency > self.n_layers:
                problems.append(
                    f"model.moe_frequency = {self.moe_frequency}: no block would have experts; "
                    f"give at most n_layers = {self.n_layers}"
                )
            if self.moe_frequency == 1 and self.dense_ffn_dim is not None:
                problems.append(
                    f"model.dense_ffn_dim = {self.dense_ffn_dim}: has no effect if all blocks "
                    "have experts; give model.moe_frequency, or leave it out"
                )
            return problems
        defaults = ModelConfig()
        return [
            f"model.{name} = {format_value(value)}: has no effect without experts; set "
            f"model.n_experts, or leave model.{name} out"
            for name in WITHOUT_EXPERTS
            if (value := getattr(self, name)) != getattr(defaults, name)
        ]

    def count_parameters(self) -> int:
        """Return the trainable parameters of the whole model."""
        mixtures = len(self.mixtures)
        return (
            self.count_block(True) * mixtures
            + self.count_block(False) * (self.n_layers - mixtures)
            + self.dim
            + self.vocab_size * self.dim * (2 - self.tie_embeddings)
        )

    def count_block(self, mixture: bool) -> int:
        """Return the trainable parameters of one block, with or without experts."""
        attention = 2 * self.dim * self.resolved_head_dim * (self.n_heads + self.kv_heads)
        if not mixture:
            return attention + 3 * self.dim * self.dense_width + self._count_vectors()
        expert = 3 * self.dim * self.ffn_dim
        experts = self.n_experts * (self.dim + expert) + self.shared_experts * expert
        return attention + experts + self._count_vectors()

    def count_active(self) -> int:
        """Return the number of parameters that one token passes through."""
        idle = max(0, self.n_experts - self.experts_per_token) * 3 * self.dim * self.ffn_dim
        return self.count_parameters() - len(self.mixtures) * idle

    def _count_vectors(self) -> int:
        """Return the number of elements in one block's norms and biases."""
        norms = (4 if self.post_norms else 2) * self.dim + (
            2 * self.resolved_head_dim if self.qk_norm else 0
        )
        biases = (self.n_heads + 2 * self.kv_heads) * self.resolved_head_dim
        return norms + (biases if self.qkv_bias else 0)

    def flops_per_token(
        self, seq_len: int, frozen: bool = False, keys: float | None = None
    ) -> float:
        """Training operations per token, forward and backward, without recomputation.

        6 per weight that multiplies a token (all but the input embedding, norms and biases, and the
        experts that the token does not go through) plus causal
        attention: 6 * n_layers * n_heads * head_dim * seq_len, half of the 12 of full attention
        (PaLM, arXiv:2204.02311, app. B). With a window w under seq_len a query sees
        w - w (w - 1) / (2 seq_len) keys on average. A frozen weight has no gradient: 4, not 6.
        `keys`: that a query sees on average, where documents are packed.
        """
        weights = (
            self.count_active()
            - self.n_layers * self._count_vectors()
            - self.dim
            - (0 if self.tie_embeddings else self.vocab_size * self.dim)
        )
        if keys is None:
            keys = seq_len / 2
            if self.sliding_window is not None and self.sliding_window < seq_len:
                keys = self.sliding_window * (1 - (self.sliding_window - 1) / (2 * seq_len))
        attention = 12.0 * self.n_layers * self.n_heads * self.resolved_head_dim * keys
        return (4.0 if frozen else 6.0) * weights + attention
