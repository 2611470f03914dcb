"""Advantages, packing, the order of tasks, and conversations as tokens."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kempner.extensions.generate.load import words_in_run, words_of_directory
from kempner.extensions.hf.source import copy_model_files
from kempner.extensions.rl.config import LossConfig
from kempner.extensions.rl.engines.client import Completion
from kempner.extensions.rl.environments.protocol import Reply, Task
from kempner.extensions.rl.exchange import RolloutExchange
from kempner.extensions.rl.orchestrate.conversation import Dialogue, DialogueWriter, open_words
from kempner.extensions.rl.orchestrate.curriculum import Curriculum
from kempner.extensions.rl.orchestrate.groups import Rollout, SampleGroup, TaskPlace, seed_of
from kempner.extensions.rl.orchestrate.packing import (
    Sample,
    deal_rows,
    pack_batch,
    tokens_that_count,
    write_rank_files,
)
from kempner.extensions.rl.trainer.publish import DirectoryPublisher, writers_of
from kempner.extensions.rl.trainer.transfer import DirectPublisher, Offer, _token
from kempner.extensions.serve.protocol import parse_prompts
from kempner.train.configure import load_config
from tests.served import make_model

KEY = "the same prompt"


def sample(prompt: int, sampled: int, first: int = 0) -> Sample:
    size = prompt + sampled
    return Sample(
        np.arange(first, first + size, dtype=np.int32),
        np.arange(size) >= prompt,
        np.where(np.arange(size) >= prompt, -0.5, 0).astype(np.float32),
    )


def group(rewards: list[float | None], lengths: list[int] | None = None) -> SampleGroup:
    lengths = lengths or [3] * len(rewards)
    rollouts = [
        Rollout(sample(2, length), "", reward, False, 0)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return SampleGroup(TaskPlace(0, "env", 0), KEY, "", rollouts)


# --- advantages ---


def test_advantages() -> None:
    four = group([1.0, 0.0, None, 0.0, 1.0])
    assert four.advantages(LossConfig(name="dapo"), 8) == [0.5, -0.5, -0.5, 0.5]
    assert four.advantages(LossConfig(name="grpo"), 8) == [1.0, -1.0, -1.0, 1.0]
    assert group([0.0, 3.0]).advantages(LossConfig(name="masked"), 8) == [-1.5, 1.5]


def test_the_penalty_prefers_short_answers_of_the_same_reward() -> None:
    loss = LossConfig(name="dapo", length_penalty=0.4)
    found = group([1.0, 1.0, 0.0], [2, 8, 2]).advantages(loss, 8)
    assert found[0] - found[1] == pytest.approx(0.4 * 6 / 8)
    assert sum(found) == pytest.approx(0)


def test_samples_that_were_cut_do_not_push() -> None:
    """They count in the mean of their group."""
    four = group([1.0, 0.0, 0.0, 1.0])
    cut = [each._replace(truncated=i == 1) for i, each in enumerate(four.rollouts)]
    loss = LossConfig(name="dapo", mask_truncated=True)
    assert replace(four, rollouts=cut).advantages(loss, 8) == [0.5, 0.0, -0.5, 0.5]
    assert four.advantages(LossConfig(name="dapo"), 8) == [0.5, -0.5, -0.5, 0.5]


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    equal = group([0.0, 0.0, 1e-9], [2, 8, 4])
    assert equal.flat and not equal.failed
    assert equal.advantages(LossConfig(length_penalty=1.0), 8) == [0.0] * 3
    assert group([1.0, None]).failed


def test_seeds_differ_and_stay() -> None:
    found = {
        seed_of(seed, place, turn) for seed in range(9) for place in range(9) for turn in (0, 1)
    }
    assert len(found) == 162 and max(found) < 2**63


# --- packing ---


@pytest.mark.parametrize("seed", range(12))
def test_packing_keeps_every_sample_and_balances(seed: int) -> None:
    draw = random.Random(seed)
    seq_len, ranks, micro = draw.choice([32, 64]), draw.choice([1, 2, 4]), draw.choice([1, 2])
    samples = [
        sample(draw.randrange(1, 9), draw.randrange(1, seq_len - 8), 100 * number)
        for number in range(draw.randrange(1, 60))
    ]
    advantages = [draw.random() + 1 for _ in samples]
    versions = [draw.randrange(5) for _ in samples]
    found = pack_batch(samples, advantages, versions, seq_len, ranks, micro)
    shapes = {array.shape for arrays in found for array in arrays.values()}
    ((rows, width),) = shapes
    assert len(found) == ranks and width == seq_len and rows % micro == 0
    assert tokens_that_count(found) == sum(int(each.sampled.sum()) for each in samples)
    seen = {}
    for arrays in found:
        for row in range(rows):
            for number in np.unique(arrays["documents"][row]):
                there = arrays["documents"][row] == number
                part = {name: array[row][there] for name, array in arrays.items()}
                if (part["targets"] >= 0).any():
                    seen[int(part["inputs"][0]) // 100] = part
    assert sorted(seen) == list(range(len(samples)))
    for number, part in seen.items():
        each = samples[number]
        assert part["inputs"].tolist() == each.tokens[:-1].tolist()
        counts = each.sampled[1:]
        assert part["targets"].tolist() == np.where(counts, each.tokens[1:], -100).tolist()
        assert part["logprobs"].tolist() == each.logprobs[1:].tolist()
        want = np.where(counts, np.float32(advantages[number]), np.float32(0))
        assert part["advantages"].tolist() == want.tolist()
        assert set(part["versions"].tolist()) == {versions[number]}


def test_rows_that_there_must_be_take_their_part() -> None:
    """Eight samples that fit one row are spread over the four that two ranks have anyway."""
    found = pack_batch([sample(1, 7) for _ in range(8)], [1.0] * 8, [0] * 8, 64, 2, 2)
    assert all(arrays["documents"].max(1).tolist() == [2, 2] for arrays in found)


def test_ranks_have_about_the_same_attention() -> None:
    draw = random.Random(1)
    samples = [sample(1, draw.choice([3, 5, 20, 60])) for _ in range(200)]
    found = pack_batch(samples, [1.0] * 200, [0] * 200, 64, 4, 1)
    costs = []
    for arrays in found:
        sizes = [
            int(((arrays["documents"][row] == number) & (arrays["inputs"][row] >= 0)).sum())
            for row in range(len(arrays["inputs"]))
            for number in range(arrays["documents"][row].max())
        ]
        costs.append(sum(size**2 for size in sizes))
    assert max(costs) < 1.05 * min(costs)


def test_rows_are_dealt_to_8000_ranks() -> None:
    """The most expensive first, each to the rank that has the least: in a moment."""
    lengths = np.random.default_rng(0).integers(1, 4096, 32_000)
    dealt = deal_rows([[item] for item in range(32_000)], lengths, 8_000)
    assert np.array_equal(np.sort(dealt, None), np.arange(32_000)) and np.shape(dealt) == (8000, 4)
    costs = (lengths[np.array(dealt)] ** 2).sum(1)
    assert costs.max() < 1.3 * costs.mean()
    assert deal_rows([[0], [1], [2], [3]], np.array([5, 4, 3, 3]), 2) == [[0, 3], [1, 2]]


def test_rank_files_do_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt reads those of an earlier one: two fsyncs of each of thousands take minutes."""
    monkeypatch.setattr(os, "fsync", None)
    write_rank_files(tmp_path / "step", pack_batch([sample(1, 7)], [1.0], [0], 64, 2, 1))
    assert len(list((tmp_path / "step").iterdir())) == 2


# --- the order of tasks ---


def curriculum(weights: dict[str, float], bounds: tuple[float, float] = (0.0, 1.0)) -> Curriculum:
    return Curriculum(weights, bounds, lambda label, number: f"{label} {number % 5}", said.append)


said: list[str] = []


def test_every_beginning_has_the_shares_of_the_environments() -> None:
    order = curriculum({"a": 3.0, "b": 1.0, "never": 0.0})
    places = [order.next() for _ in range(100)]
    assert [place.place for place in places] == list(range(100))
    for end in range(1, 101):
        assert abs(sum(place.env == "a" for place in places[:end]) - 0.75 * end) < 1
    assert [place.number for place in places if place.env == "b"] == list(range(25))


def test_the_order_goes_on_after_a_resume() -> None:
    whole, again = curriculum({"a": 0.7, "b": 0.3}), curriculum({"a": 0.7, "b": 0.3})
    for _ in range(13):
        whole.next()
    again.load(whole.state())
    assert [whole.next() for _ in range(20)] == [again.next() for _ in range(20)]


def test_prompts_out_of_bounds_are_not_asked_again() -> None:
    order = curriculum({"a": 1.0}, (0.2, 0.8))
    order.learn([SampleGroup(TaskPlace(0, "a", 1), "a 1", "", group([1.0, 1.0]).rollouts)])
    order.learn([SampleGroup(TaskPlace(0, "a", 2), "a 2", "", group([1.0, 0.0]).rollouts)])
    assert [order.next().number for _ in range(5)] == [0, 2, 3, 4, 5]
    for number in range(5):
        order.learn(
            [SampleGroup(TaskPlace(0, "a", number), f"a {number}", "", group([0.0, 0.0]).rollouts)]
        )
    said.clear()
    assert order.next().number == 6 and "all are asked again" in said[0]


# --- conversations ---


def test_a_conversation_keeps_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    """`a few` is sampled as letters, which the tokenizer would write as fewer tokens."""
    words = words_of_directory(make_model(tmp_path))
    writer, end = DialogueWriter(words), 256
    task = Task([{"role": "user", "content": "hello"}])
    prompt = writer.prompt(task)
    assert words.tokenizer.decode(prompt).endswith("user: hello\nassistant:")
    letters = [token for letter in "a few" for token in words.tokenizer.encode(letter)]
    assert words.tokenizer.encode("a few") != letters
    talk = Dialogue(task.messages, prompt)
    talk.say(Completion([*letters, end], [-1.0] * 6, [3], "stop"), writer.text([*letters, end]))
    assert talk.text == "a few" and talk.open
    talk.hear(Reply("more"), writer.reply(task, Reply("more"), end))
    talk.say(Completion(letters[:1], [-2.0], [4], "length"), "a")
    assert talk.oldest == 3 and talk.truncated and not talk.open
    made = talk.sample
    assert made.tokens[: len(prompt)].tolist() == prompt
    assert made.tokens[len(prompt) :][:6].tolist() == [*letters, end]
    assert made.sampled.sum() == 7 and made.logprobs[made.sampled].tolist() == [-1.0] * 6 + [-2.0]
    text = words.tokenizer.decode(made.tokens[~made.sampled][len(prompt) :].tolist())
    assert text == "\nuser: more\nassistant:"


def test_the_token_that_ends_a_turn_is_there_once(tmp_path: Path) -> None:
    """The template writes it after the assistant's words; the model may have sampled it."""
    folder = make_model(tmp_path, eos_token_id=0)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{{ m.content }}", "{{ m.content }}<|endoftext|>"))
    writer = DialogueWriter(words_of_directory(folder))
    task = Task([{"role": "user", "content": "hello"}])
    cut, ended = (writer.reply(task, Reply("more"), last) for last in (65, 0))
    assert cut == [0, *ended] and ended[0] != 0


def test_plain_text_goes_on_as_it_is() -> None:
    words = open_words("bytes", None)
    writer = DialogueWriter(words)
    assert writer.prompt(Task("ab")) == [256, 97, 98]
    assert writer.reply(Task("ab"), Reply("!"), 256) == [33]
    with pytest.raises(ValueError, match="no chat template"):
        writer.prompt(Task([{"role": "user", "content": "a"}]))


def test_weights_go_over_the_network_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kempner.jobs.this_job.own_address", lambda: "management")
    for interface, expected in (
        ("lo", "127.0.0.1"),
        ("none-such", "management"),
        ("", "management"),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert Offer("key").address.rpartition(":")[0] == expected


def test_a_version_for_which_the_disk_had_no_room_is_published_by_the_next_try(
    one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number of the error, by which the trainer knows that it may wait. The first version
    stays the one that is files."""
    import torch

    from kempner.model.config import ModelConfig
    from kempner.model.decoder import Decoder

    exchange, published = RolloutExchange(tmp_path), list[int]()

    def by_files(version: int) -> None:
        fail_once()
        published.append(version)

    def fail_once(*_: object) -> None:
        if not failed:
            failed.append(errno.ENOSPC)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failed = list[int]()
    model = Decoder(ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=8))
    publisher = DirectPublisher(by_files, model, exchange, torch.float32, 9)
    with pytest.raises(OSError, match="No space"):
        publisher.publish(0)
    publisher.publish(0)
    assert published == [0]
    (exchange.root / "beside").mkdir()
    (exchange.root / "beside" / "config.json").write_text("{}")
    (exchange.version(1)).mkdir(parents=True)
    (exchange.version(1) / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as full:
        publisher.publish(1)
    assert full.value.errno == errno.ENOSPC and exchange.newest() is None
    (exchange.version(1) / "config.json").unlink()
    publisher.publish(1)
    assert exchange.newest() == 1 and published == [0]


@pytest.mark.parametrize("start", ["a model", "no model"])
@pytest.mark.parametrize("ends", ["named", "not named"])
def test_engines_and_exports_have_the_tokenizer_of_the_run(
    one_process: None, tmp_path: Path, start: str, ends: str
) -> None:
    """That of a chat model, whose turns end with a token that the base model lacks."""
    import torch

    from kempner.model.decoder import Decoder

    base, run, turn = make_model(tmp_path / "base"), tmp_path / "run", 259
    (base / "vocab.json").write_text("{}")  # of an older form of the tokenizer
    chat = shutil.copytree(base, tmp_path / "chat", ignore=shutil.ignore_patterns("*.safe*"))
    for name in ("vocab.json", "config.json"):
        (chat / name).unlink()
    (chat / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    content = json.loads((chat / "tokenizer.json").read_text())
    special = content["added_tokens"][0] | {"id": turn, "content": "<|im_end|>"}
    content["added_tokens"].append(special)
    (chat / "tokenizer.json").write_text(json.dumps(content))
    if ends == "named":
        (chat / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, 256]}))
    words = [f"--rl.tokenizer={chat}", "--rl.env=[{id='arithmetic'}]", f"--run.dir={run}"]
    words += ["--train.seq_len=128", "--rl.sampling.max_tokens=8", "--model.vocab_size=260"]
    if start == "a model":
        words.append(f"--model.init_from={base}")
        copy_model_files(base, run / "hf")  # as the first start does
    else:
        words += ["--model.dim=48", "--model.n_layers=2", "--model.n_heads=4"]
    cfg, exchange = load_config([], words), RolloutExchange(run)
    model = Decoder(cfg.model)
    DirectoryPublisher(cfg, model, exchange, torch.device("cpu")).publish(0)
    ours = open_words(str(chat), cfg.model.init_from)
    assert ours.ends == ({turn, 256} if ends == "named" else {0})
    kept = words_in_run(run)  # of which exports and generate.py make theirs
    assert kept is not None
    for theirs in (words_of_directory(exchange.version(0)), kept):
        assert theirs.ends == ours.ends and theirs.tokenizer.eod == ours.tokenizer.eod
        assert theirs.fingerprint() == ours.fingerprint() and theirs.begin == ours.begin
        talk = [{"role": "user", "content": "a"}]
        assert (
            theirs.chat(talk)
            == DialogueWriter(ours).prompt(Task(talk))
            == [*theirs.tokenizer.encode("a"), turn]
        )
        assert not (theirs.folder / "vocab.json").exists()
    assert parse_prompts([1, turn], theirs, map) == [[1, turn]]


def test_a_token_of_ones_own_where_rl_sh_has_made_none(tmp_path: Path) -> None:
    exchanges = [RolloutExchange(tmp_path / name) for name in ("a", "b")]
    tokens = {_token(exchange) for exchange in exchanges}
    assert len(tokens) == 2 and all(len(token) == 32 for token in tokens)
    assert {_token(exchange) for exchange in exchanges} == tokens
    for exchange in exchanges:
        assert exchange.token.stat().st_mode & 0o777 == 0o600


def test_writers_of_a_version_have_their_tensors_by_turns() -> None:
    """However far the model has been gathered, each writer has had its share of the bytes."""
    sizes = {f"{layer}.{i}": size for layer in range(8) for i, size in enumerate((9, 30, 1, 60, 2))}
    writer = writers_of(sizes, [0, 2, 5])
    had = dict.fromkeys((0, 2, 5), 0)
    for name, size in sizes.items():
        had[writer[name]] += size
        assert max(had.values()) - min(had.values()) <= 60
