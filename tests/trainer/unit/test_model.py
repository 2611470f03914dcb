"""The decoder against transformers' models, its arithmetic, and every shape that ships."""

from __future__ import annotations

import weakref
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kempner.config.loading import load_config_files
from kempner.config.toml import loads
from kempner.data.source import IGNORE
from kempner.extensions.hf.families import family_of
from kempner.model.attention import Documents, Visible, attend, attention_pattern
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.model.loss import chunk_loss, cross_entropy
from kempner.model.shapes import ROUTER_BIAS, tensor_shapes
from kempner.train.sections import RunConfig

CONFIGS = Path(__file__).parents[3] / "configs" / "train"
# Parameters as published or counted by hand: V*D embedding, V*D output unless tied, blocks, norm.
COUNTS = {
    "quickstart": 1_623_936,
    "debug": 853_376,
    "125m": 123_587_328,
    "1b": 1_235_814_400,
    "7b": 6_738_415_616,
    "13b": 13_015_864_320,
    "70b": 70_553_706_496,
    "moe-30b": 30_532_122_624,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configuration_loads_and_has_the_parameters_of_its_name(path: Path) -> None:
    if "init_from" in loads(path.read_text()).get("model", {}):
        return  # its shape is that of its weights
    cfg = load_config_files(RunConfig, [path], [])
    with torch.device("meta"):
        built = sum(p.numel() for p in Decoder(cfg.model).parameters())
    assert built == cfg.model.count_parameters() == COUNTS[path.stem]
    family_of(cfg.model)  # what is shipped can be exported


def copy_to_reference(model: Decoder, reference: torch.nn.Module) -> None:
    """Our weights into a transformers causal language model: a renaming."""
    names = {
        "embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj",
    }  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        head, _, tail = module.partition(".")
        if head == "blocks":
            index, _, inner = tail.partition(".")
            state[f"model.layers.{index}.{names[inner]}.{kind}"] = value
        else:
            state[f"{names[head]}.{kind}"] = value
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)


SHAPE = ModelConfig(
    vocab_size=101, dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=112, max_seq_len=96
)


@pytest.mark.parametrize(
    "case", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "mistral"]
)
def test_logits_equal_transformers(case: str) -> None:
    import transformers

    common = {
        "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if case == "qwen3":
        cfg = ModelConfig(**{**SHAPE.__dict__, "qk_norm": True, "head_dim": 16})
        settings = transformers.Qwen3Config(
            **common, head_dim=16, tie_word_embeddings=False, rope_parameters=rope
        )
        reference = transformers.Qwen3ForCausalLM(settings)
    elif case == "qwen2":
        cfg = replace(SHAPE, qkv_bias=True)
        reference = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**common, rope_parameters=rope)
        )
    elif case == "mistral":
        cfg = replace(SHAPE, sliding_window=24)
        settings = transformers.MistralConfig(
            **common, sliding_window=24, rope_parameters=rope, attn_implementation="eager"
        )
        reference = transformers.MistralForCausalLM(settings)
    else:
        changes: dict[str, object] = {"tie_embeddings": case == "llama-tied"}
        if case == "llama3-rope":
            rope = {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }  # fmt: skip
            changes |= {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_len": 32}
        cfg = ModelConfig(**{**SHAPE.__dict__, **changes})
        settings = transformers.LlamaConfig(
            **common, tie_word_embeddings=case == "llama-tied", rope_parameters=rope
        )
        reference = transformers.LlamaForCausalLM(settings)
    torch.manual_seed(0)
    model = Decoder(cfg)
    with torch.no_grad():
        for p in model.parameters():  # norms away from 1, logits of order 1
            p.normal_(mean=0.5 if p.ndim == 1 else 0.0, std=0.1)
    copy_to_reference(model, reference)
    tokens = torch.randint(0, 101, (2, 96))
    with torch.no_grad():
        ours, theirs = model(tokens), reference.eval()(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_n_kv_heads_unset_means_n_heads() -> None:
    assert ModelConfig(n_heads=8, dim=64).kv_heads == 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"dim": 65}, "dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_factor": 8.0, "rope_high_freq_factor": 1.0}, "rope_high_freq_factor"),
    ],
)
def test_shape_that_cannot_be_built_is_named(change: dict[str, object], word: str) -> None:
    problems = ModelConfig(**{**SHAPE.__dict__, **change}).problems()
    assert len(problems) == 1 and word in problems[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("reset", [True, False])
def test_packed_documents_do_not_see_each_other(window: int | None, reset: bool) -> None:
    """Each document's logits are those that it has alone; without a reset of the positions too,
    because rotary positions are relative."""
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, sliding_window=window))
    tokens = torch.randint(0, 101, (2, 32))
    lengths = [[7, 1, 24], [32]]
    index = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    documents = Documents.of(index, reset)
    assert documents.starts.tolist() == [0, 7, 8, 32, 64]
    with torch.no_grad():
        packed = model(tokens, documents=documents)
        for row, sizes in enumerate(lengths):
            parts = zip(tokens[row].split(sizes), packed[row].split(sizes), strict=True)
            for alone, logits in parts:
                torch.testing.assert_close(logits, model(alone[None])[0], atol=1e-5, rtol=1e-4)


def test_the_flash_kernel_gets_documents_and_windows() -> None:
    """What varlen_attn is given on a GPU, by a stand-in that attends to one sequence after the
    other as its documentation says."""

    def one_by_one(q, k, v, starts, starts_k, longest, longest_k, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert starts is starts_k and longest == longest_k >= int(starts.diff().max())
        left, right = window_size
        assert right == 0
        parts = []
        for begin, end in pairwise(starts.tolist()):
            at = torch.arange(end - begin)
            behind = at[:, None] - at
            seen = (behind >= 0) & ((behind <= left) | (left < 0))
            heads = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            y = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=enable_gqa)
            parts.append(y[0].transpose(0, 1))
        return torch.cat(parts)

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    documents = Documents.of(torch.tensor([[0] * 5 + [1] * 11, [0] * 16]), True)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    for window in (None, 3):
        dense = attention_pattern(tokens, window, documents, q.dtype)
        assert dense.mask is not None
        flash = Visible(window, starts=documents.starts, kernel=one_by_one)
        torch.testing.assert_close(attend(q, k, v, flash), attend(q, k, v, dense))


def test_post_norms_are_on_what_the_layers_return() -> None:
    """Their weights at 0 leave the residual stream as it is; the names are those of tensor_shapes.
    Without experts, and with."""
    plain = replace(SHAPE, post_norms=True, norm_eps=0.0)
    for cfg in (plain, replace(plain, n_experts=2)):
        model = Decoder(cfg)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert list(shapes.items()) == list(tensor_shapes(cfg).items())
        tokens = torch.arange(12).view(2, 6)
        normal = model(tokens)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(100.0 if name.endswith(("wo.weight", "w2.weight", "experts.w2")) else 1.0)
        torch.testing.assert_close(model(tokens), normal, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(0.0 if "post_norm" in name else 1.0)
        alone = model.predict(model.embed(tokens), None)
        torch.testing.assert_close(model(tokens), alone)


SWITCHES = [
    (field.name, value)
    for field in fields(ModelConfig)
    for value in (True, False, *(field.metadata["choices"] or ()))
    if type(value) is type(field.default) and value != field.default
]


@pytest.mark.parametrize(("name", "value"), SWITCHES)
def test_each_switch_is_in_the_tables(name: str, value: bool | str) -> None:
    """The tensors by name, in their order, and the number of their elements."""
    experts = int(name.startswith("router"))
    options: dict[str, Any] = {"n_experts": 4 * experts, "post_norms": True, name: value}
    cfg = replace(SHAPE, **options)
    model = Decoder(cfg)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buffers = {f"blocks.{i}.{ROUTER_BIAS}": (4,) for i in cfg.mixtures if cfg.router_bias}
    assert list((buffers | shapes).items()) == list(tensor_shapes(cfg).items())
    assert sum(p.numel() for p in model.parameters()) == cfg.count_parameters()


def test_flops_follow_from_the_shapes() -> None:
    """Six per multiplied weight, and causal attention: count the matrices of the built model."""
    model = Decoder(SHAPE)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 6 * SHAPE.n_layers * SHAPE.dim * 32
    assert SHAPE.flops_per_token(32) == 6 * weights + attention
    biased = replace(SHAPE, qkv_bias=True, qk_norm=True, post_norms=True)
    assert sum(p.numel() for p in Decoder(biased).parameters()) == biased.count_parameters()
    assert biased.flops_per_token(32) == SHAPE.flops_per_token(32)
    # A window of 8: 1 + 2 + ... + 8 keys, then 8 each; in half of the units of a whole sequence.
    seen = replace(SHAPE, sliding_window=8).flops_per_token(32) - 6 * weights
    assert seen == attention * 2 / 32 * (36 + 24 * 8) / 32


def plain_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    keep = targets != IGNORE
    logits = (x[keep] @ weight.T).double()
    return -torch.log_softmax(logits, -1)[torch.arange(int(keep.sum())), targets[keep]].sum()


@pytest.mark.parametrize("ignored", [0, 5, 24])
def test_chunked_loss_equals_the_plain_sum(monkeypatch: pytest.MonkeyPatch, ignored: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 16, requires_grad=True)
    weight = torch.randn(11, 16, requires_grad=True)
    targets = torch.randint(0, 11, (24,))
    targets[:ignored] = IGNORE
    expected = plain_loss(x, weight, targets)
    expected_grads = torch.autograd.grad(expected, (x, weight), allow_unused=True)
    for tile, chunk_logits in ((256, 1 << 27), (7, 11 * 7)):  # one chunk; 7 rows, the last short
        monkeypatch.setattr("kempner.model.loss.CHUNK_LOGITS", chunk_logits)
        monkeypatch.setattr("kempner.model.loss.LOSS_TILE", tile)
        loss, terms = cross_entropy(x, weight, targets)
        assert not terms.requires_grad and (terms[targets == IGNORE] == 0).all()
        torch.testing.assert_close(terms.sum(), loss.detach())
        grads = torch.autograd.grad(loss, (x, weight))
        torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-6)
        for got, want in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)


def test_the_gradient_of_a_chunk_is_gone_before_the_next() -> None:
    """With a large vocabulary it takes a GiB."""
    gradients: list[weakref.ref[torch.Tensor]] = []

    def chunk(*arguments: Any) -> Any:
        assert all(each() is None for each in gradients)
        found = chunk_loss(*arguments)
        assert found[2] is not None
        gradients.append(weakref.ref(found[2]))
        return found

    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (12, 20))
    cross_entropy(x, weight, torch.randint(20, (12,)), chunk=4, compiled=chunk)
    assert len(gradients) == 3


def test_the_z_loss_is_that_of_the_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log p + z log^2 Z in fp64, in several chunks. The returned loss is that of -log p alone."""
    torch.manual_seed(0)
    x = (3 * torch.randn(24, 16)).requires_grad_()
    weight = torch.randn(11, 16, requires_grad=True)
    targets = torch.randint(0, 11, (24,))
    targets[3:9] = IGNORE
    plain = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    squares = (plain[0] @ plain[1].T).logsumexp(1)[targets != IGNORE].square().sum()
    total = plain_loss(*plain, targets) + 0.3 * squares
    expected = torch.autograd.grad(7 * total, plain)
    monkeypatch.setattr("kempner.model.loss.CHUNK_LOGITS", 11 * 7)
    monkeypatch.setattr("kempner.model.loss.LOSS_TILE", 7)
    loss, terms, found = cross_entropy(x, weight, targets, z_loss=0.3)
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), squares, rtol=1e-6, atol=0)
    torch.testing.assert_close((loss, terms), cross_entropy(x, weight, targets))
    for got, want in zip(torch.autograd.grad(7 * loss, (x, weight)), expected, strict=True):
        assert (got.double() - want).norm() < 1e-6 * want.norm()


def test_the_weights_gradient_is_summed_over_chunks_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 32 chunks a sum in bf16 loses a digit."""
    torch.manual_seed(0)
    x, weight = torch.randn(1024, 64), torch.randn(128, 64) / 8
    targets = torch.randint(128, (1024,))
    exact = weight.double().requires_grad_()
    plain_loss(x.double(), exact, targets).backward()
    monkeypatch.setattr("kempner.model.loss.LOSS_TILE", 32)
    errors = {}
    for chunk_logits in (1 << 27, 32 * 128):
        monkeypatch.setattr("kempner.model.loss.CHUNK_LOGITS", chunk_logits)
        ours = weight.bfloat16().requires_grad_()
        cross_entropy(x.bfloat16(), ours, targets)[0].backward()
        errors[chunk_logits] = ((ours.grad.double() - exact.grad).norm() / exact.grad.norm()).item()
    assert errors[32 * 128] < 1.2 * errors[1 << 27], errors


def test_loss_of_a_batch_of_ignored_targets_is_zero_not_nan() -> None:
    loss, _ = cross_entropy(torch.randn(4, 8), torch.randn(5, 8), torch.full((4,), IGNORE))
    assert loss.item() == 0.0


def test_forward_with_targets_is_the_loss_of_the_logits() -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(SHAPE), torch.randint(0, 101, (2, 16))
    logits = model(tokens).flatten(0, 1)
    expected = F.cross_entropy(logits, tokens.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, tokens), expected)
    loss, terms = model(tokens, tokens, token_losses=True)
    torch.testing.assert_close(loss, expected)
    each = F.cross_entropy(logits, tokens.flatten(), reduction="none").view(2, 16)
    torch.testing.assert_close(terms, each.detach())
