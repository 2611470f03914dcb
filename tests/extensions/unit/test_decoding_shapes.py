"""Kernels that are planned for each shape of attention meet few of them while texts are generated,
served and scored: cuDNN, which torch prefers on Hopper and Blackwell, took up to half a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kempner.extensions.generate import whole_texts
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine
from kempner.extensions.generate.load import Loaded, load_model_and_tokenizer
from kempner.extensions.generate.texts import Text, generate_texts
from kempner.extensions.serve.alternatives import score_alternatives
from kempner.extensions.serve.http import Server
from kempner.extensions.serve.worker import Worker
from kempner.model.cache import CACHE_BLOCK, KVCache
from kempner.model.decoder import Decoder
from tests.served import Client, make_model

SLOTS, WINDOW = 4, 3 * CACHE_BLOCK
MOST = 2 * SLOTS * WINDOW // CACHE_BLOCK  # prompts, and steps; of so many rows and blocks
LONG = 2 * CACHE_BLOCK - 10  # tokens of the longest prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, max_position_embeddings=WINDOW)


@pytest.fixture
def loaded(folder: Path) -> Iterator[Loaded]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield load_model_and_tokenizer(str(folder), "cpu")
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = set()
    real = F.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        mask = named.get("attn_mask")
        found.add((q.shape, k.shape, None if mask is None else mask.shape))
        return real(q, k, v, *rest, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return found


def prompts(seed: int = 1) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(256) for _ in range(drawn.randint(3, LONG))] for _ in range(12)]


def generated(loaded: Loaded, fixed: bool) -> None:
    engine = Engine[Text](loaded.model, 260, WINDOW, SLOTS, fixed)
    sampling = Sampling(temperature=0, max_tokens=60)
    for _ in generate_texts(engine, loaded.words.tokenizer, set(), prompts(), sampling):
        pass


def served(loaded: Loaded, fixed: bool) -> None:
    """Two requests of many prompts at a time, over HTTP, as an orchestrator sends them."""
    server = Server("127.0.0.1", 0, "small", "")
    server.worker = worker = Worker(loaded, SLOTS, WINDOW, 64, fixed=fixed)
    client = Client(server.port)
    threads = [Thread(target=run) for run in (worker.run, lambda: server.serve_forever(0.02))]
    asked = [
        Thread(target=client.complete, args=(texts,), kwargs={"max_tokens": 60, "n": 2, "seed": 1})
        for texts in (prompts()[:8], prompts()[8:])
    ]
    for thread in threads + asked:
        thread.start()
    for thread in asked:
        thread.join()
    worker.end("the test is over")
    server.shutdown()
    for thread in threads:
        thread.join()
    server.server_close()
    assert worker.finished.total() == 24


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("work", [generated, served])
def test_few_shapes(
    work: Callable[[Loaded, bool], None], fixed: bool, loaded: Loaded, shapes: set[Any]
) -> None:
    work(loaded, fixed)
    assert 0 < len(shapes) <= (2 if fixed else MOST), sorted(map(str, shapes))
    assert all(keys[2] % CACHE_BLOCK == 0 for _, keys, _ in shapes)


def test_few_shapes_where_texts_are_scored(loaded: Loaded, shapes: set[Any]) -> None:
    harness = pytest.importorskip("kempner.extensions.generate.harness")
    model = harness.HarnessModel(loaded, SLOTS)
    texts = ["".join(map(chr, prompt)) for prompt in prompts()]
    model.loglikelihood([SimpleNamespace(args=(text[: len(text) // 2], text)) for text in texts])
    model.generate_until([SimpleNamespace(args=(t, {"max_gen_toks": 30})) for t in texts])
    assert 0 < len(shapes) <= MOST, sorted(map(str, shapes))


def test_a_task_needs_memory_for_its_texts_alone(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of the whole window, and the logits of whole texts, were more than a GPU has."""
    harness = pytest.importorskip("kempner.extensions.generate.harness")
    lengths, rows = [], []
    make, predict = KVCache.__init__, Decoder.predict

    def watched_cache(cache: KVCache, *words: Any) -> None:
        lengths.append(words[2])
        make(cache, *words)

    def watched(model: Decoder, x: torch.Tensor, targets: None) -> Any:
        rows.append(x.shape[:-1].numel())
        return predict(model, x, targets)

    monkeypatch.setattr(KVCache, "__init__", watched_cache)
    monkeypatch.setattr(Decoder, "predict", watched)
    monkeypatch.setattr(whole_texts, "LOGPROB_CHUNK", 8)
    model = harness.HarnessModel(loaded, SLOTS)
    model.generate_until([SimpleNamespace(args=("a few", {"max_gen_toks": 5}))])
    assert lengths == [CACHE_BLOCK] and lengths[0] < WINDOW
    context, rest = [1, 2, 3], [n % 250 for n in range(20)]
    rows.clear()
    ((value, _),) = model._loglikelihood_tokens([(None, context, rest)])
    assert rows == [8, 8, 4]
    looked = score_alternatives(loaded.model, 259, [*model.begin, *context, *rest], 2)
    assert max(rows) == 8 and sum(looked.values[-20:]) == pytest.approx(value, abs=1e-3)


def test_cudnn_has_no_part(loaded: Loaded) -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_scores_are_shares_of_all_rows_of_the_model(tmp_path: Path) -> None:
    """Also of those beyond the tokenizer, as lm-eval's own models have it."""
    harness = pytest.importorskip("kempner.extensions.generate.harness")
    model = harness.HarnessModel(
        load_model_and_tokenizer(str(make_model(tmp_path, vocab_size=320)), "cpu"), 1
    )
    ((value, _),) = model.loglikelihood([SimpleNamespace(args=("a few", " words"))])
    context, rest = model.tok_encode("a few"), model.tok_encode(" words")
    ids = torch.tensor([[*model.begin, *context, *rest]])
    with torch.no_grad():
        logprobs = model.model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert value == pytest.approx(float(logprobs[-len(rest) :].sum()), abs=1e-3)
