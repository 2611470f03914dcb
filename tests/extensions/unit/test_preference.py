"""The losses on preferences, against a few plain lines each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kempner.data.batch import MicroBatch
from kempner.data.source import IGNORE
from kempner.extensions.preference import losses
from kempner.extensions.preference.losses import DPO, Preference, Reward, token_losses, token_scores
from kempner.model.attention import Documents
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder

END, DEVICE = 9, torch.device("cpu")
LENGTHS = [[(5, 7), (6, 4)], [(9, 3)]]  # of the answers in two rows, with their prompts
ROOM = 22  # the first row is full


def model_of(seed: int, loss: Any) -> Decoder:
    torch.manual_seed(seed)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    model = Decoder(ModelConfig(vocab_size=50, max_seq_len=64, **shape))
    model.loss = loss
    return model


def packed() -> tuple[MicroBatch, list[tuple[Tensor, Tensor]]]:
    """Two rows of preferences, and each answer alone: its tokens, and which are in the loss."""
    generator = torch.Generator().manual_seed(3)
    answers = []
    inputs = torch.full((len(LENGTHS), ROOM), END)
    targets = torch.full_like(inputs, IGNORE)
    index = torch.zeros(inputs.shape, dtype=torch.int32)
    for row, pairs in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(length for pair in pairs for length in pair):
            tokens = torch.randint(50, (length + 1,), generator=generator)
            mask = torch.arange(length + 1) >= 2
            answers.append((tokens, mask))
            place = slice(at, at + length)
            inputs[row, place] = tokens[:-1]
            targets[row, place] = torch.where(mask, tokens, IGNORE)[1:]
            index[row, place] = number
            at += length
        index[row, at:] = 2 * len(pairs)
    return MicroBatch(inputs, targets, Documents.of(index, reset_positions=True)), answers


def check(preference: Preference, model: Decoder, expected: list[Tensor]) -> None:
    """`expected`: the margin of each pair, from which the model's gradients follow."""
    batch, _ = packed()
    loss, places, judged = preference(model, batch)
    reference = sum(-F.logsigmoid(margin) for margin in expected)
    assert isinstance(reference, Tensor)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    assert int((judged.targets != IGNORE).sum()) == len(expected) == 3
    torch.testing.assert_close(places.sum(), loss.detach())
    assert torch.equal(places > 0, judged.targets != IGNORE)
    numbers = preference.numbers()
    assert float(numbers["ordered_right"]) == sum(float(margin.detach()) > 0 for margin in expected)
    torch.testing.assert_close(numbers["margin_sum"], torch.stack(expected).sum().detach())
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(loss, parameters, allow_unused=True)
    theirs = torch.autograd.grad(reference, parameters, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [losses.CHUNK_LOGITS, 50 * 7])
def test_dpo_equals_ten_plain_lines(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the logits come in chunks."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk)
    model, reference = model_of(1, token_losses), model_of(2, token_losses)
    reference.requires_grad_(False)
    _, answers = packed()
    ratios = []
    for tokens, mask in answers:
        logs = [m(tokens[None, :-1])[0].log_softmax(-1) for m in (model, reference)]
        ours, theirs = (log.gather(1, tokens[1:, None])[:, 0][mask[1:]].sum() for log in logs)
        ratios.append(ours - theirs)
    margins = [0.3 * (ratios[i] - ratios[i + 1]) for i in range(0, len(ratios), 2)]
    check(DPO(reference, 0.3, DEVICE), model, margins)


def test_a_reward_is_what_transformers_classifier_says() -> None:
    """With the row of the output layer as its score."""
    transformers = pytest.importorskip("transformers")
    from tests.trainer.unit.test_model import copy_to_reference

    model = model_of(1, token_scores)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 50,
             "rms_norm_eps": 1e-5, "max_position_embeddings": 64}  # fmt: skip
    language = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    copy_to_reference(model, language)
    config = transformers.LlamaConfig(**shape, num_labels=1)
    classifier = transformers.LlamaForSequenceClassification(config)
    classifier.model = language.model
    classifier.score.weight = torch.nn.Parameter(language.lm_head.weight[END : END + 1])
    batch, answers = packed()
    scores = Reward(END, DEVICE).values(model, batch)  # and that of the end of the row
    expected = [classifier(tokens[None, :-1]).logits[0, 0] for tokens, _ in answers]
    torch.testing.assert_close(scores[:-1], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_reward_model_equals_plain_lines() -> None:
    model = model_of(1, token_scores)
    _, answers = packed()
    scores = [model(tokens[None, :-1])[0, -1, END] for tokens, _ in answers]
    margins = [scores[i] - scores[i + 1] for i in range(0, len(scores), 2)]
    check(Reward(END, DEVICE), model, margins)
