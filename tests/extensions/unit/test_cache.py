"""Generation with the key-value cache gives what the model gives without it; sampling gives what
transformers' filters give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kempner.data.text.tokenizer import ByteTokenizer
from kempner.extensions.generate import token_step
from kempner.extensions.generate.compiled_step import CompiledBlock
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine, GenerationRequest
from kempner.extensions.generate.sampling import filter_probabilities, sample_tokens
from kempner.extensions.generate.stream import TextStream
from kempner.extensions.generate.texts import Text, Texts, generate_texts
from kempner.extensions.generate.token_step import TokenStep
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder

VOCAB, MOST = 101, 24
SHAPE = ModelConfig(
    vocab_size=VOCAB, dim=64, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=112, max_seq_len=64
)
CASES = {
    "grouped": {},
    "as many keys": {"n_kv_heads": 8},
    "window": {"sliding_window": 9},
    "llama3 rope": {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_len": 16},
    "qwen": {"qk_norm": True, "qkv_bias": True},
    "experts": {"n_experts": 6, "ffn_dim": 16, "shared_experts": 1, "router_bias": True},
    "capped": {"attention_softcap": 2.0, "sliding_window": 9},
}
GREEDY = Sampling(temperature=0, max_tokens=MOST)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make a busy machine slow."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def build(**changes: object) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, **changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(mean=0.5 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def without_cache(model: Decoder, prompt: list[int], count: int, window: int) -> list[int]:
    """The likeliest tokens, each from a forward pass over all that the model may see."""
    ids, start = list(prompt), 0
    for left in range(count, 0, -1):
        if len(ids) - start > window or (left == count and len(ids) >= window):
            start = len(ids) - window + min(left - 1, window // 2)
        ids.append(int(model(torch.tensor([ids[start:]]))[0, -1].argmax()))
    return ids[len(prompt) :]


def with_cache(
    model: Decoder, prompts: list[list[int]], window: int, slots: int
) -> list[list[int]]:
    """The same from the engine, whose requests join and leave as there is room."""
    engine = Engine[GenerationRequest](model, VOCAB, window, slots)
    requests = [GenerationRequest(n, prompt, GREEDY) for n, prompt in enumerate(prompts)]
    waiting = list(requests)
    while waiting or engine.requests:
        if waiting and len(engine.requests) < slots:
            engine.join([waiting.pop(0)])
        else:
            engine.step()
        for request in list(engine.requests):
            if len(request.new) == MOST:
                engine.leave(request)
    return [request.new for request in requests]


@pytest.mark.parametrize("case", CASES)
def test_the_cache_changes_no_token(case: str) -> None:
    model = build(**CASES[case])
    prompts = prompts_of(1, 20, 5, 13, 30)
    expected = [without_cache(model, prompt, MOST, 64) for prompt in prompts]
    assert len({tuple(text) for text in expected}) == 5 and max(map(len, map(set, expected))) > 6
    for slots in (1, 2, 5):
        assert with_cache(model, prompts, 64, slots) == expected


def test_the_cache_changes_no_logit() -> None:
    """Prompts of one batch, padded, and rows that move when another leaves."""
    model, counts = build(sliding_window=9), [20, 5, 13]
    texts = torch.tensor(prompts_of(40, 40, 40))
    full = model(texts)
    cache = Engine[GenerationRequest](model, VOCAB, 64, 4).cache
    padded = torch.zeros(3, 20, dtype=torch.int64)
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        padded[row, :count] = text[:count]
    rows = [0, 1, 2]
    logits, advance = model(padded, cache=cache.join(counts))[:, 0], TokenStep(model, cache)
    for step in range(20):
        expected = torch.stack([full[row, counts[row] - 1] for row in rows])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        if step == 8:
            cache.leave(0)
            rows = [2, 1]
        logits = advance([int(texts[row, counts[row]]) for row in rows], cache.advance())
        counts = [count + (row in rows) for row, count in enumerate(counts)]


@pytest.mark.parametrize("case", ["grouped", "qwen", "window", "capped"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_for_each_of_few_shapes(
    case: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose graphs read and write the same memory again and again."""
    model, prompts = build(**CASES[case], max_seq_len=192), prompts_of(5, 70, 20)
    expected = [without_cache(model, prompt, MOST, 192) for prompt in prompts]

    def capture(work: Callable[[], object]) -> SimpleNamespace:
        if fails:
            raise RuntimeError("not permitted when a stream is capturing")
        work()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(token_step, "capture_graph", capture)
    engine = Engine[GenerationRequest](model, VOCAB, 192, 3)
    steps = engine._token_step = TokenStep(model, engine.cache)
    steps.uses_graphs = True
    requests = [GenerationRequest(n, prompt, GREEDY) for n, prompt in enumerate(prompts)]
    for request in requests:
        engine.join([request])
        engine.step()
    while engine.requests:
        for request in [each for each in engine.requests if len(each.new) >= MOST]:
            engine.leave(request)
        if engine.requests:
            engine.step()
    assert [request.new[:MOST] for request in requests] == expected
    assert set(steps.by_shape) <= {(rows, places) for rows in (1, 2, 3) for places in (64, 128)}
    assert set(steps.draws) <= {(rows, GREEDY.filters) for rows in (1, 2, 3)}


@pytest.mark.parametrize(
    "case",
    ["qwen", *(pytest.param(each, marks=pytest.mark.soak) for each in ("capped", "experts"))],
)
def test_a_compiled_step(case: str) -> None:
    """Rows that join and leave; blocks with experts are computed as they are."""
    model, prompts = build(**CASES[case]), prompts_of(5, 30)
    expected = [without_cache(model, prompt, MOST, 64) for prompt in prompts]
    engine = Engine[GenerationRequest](model, VOCAB, 64, 2, compiled=True)
    requests = [GenerationRequest(n, prompt, GREEDY) for n, prompt in enumerate(prompts)]
    engine.join(requests)
    while engine.requests:
        engine.step()
        for request in [each for each in engine.requests if len(each.new) == MOST]:
            engine.leave(request)
    assert [request.new for request in requests] == expected
    steps = engine._token_step
    assert steps is not None
    compiled = [isinstance(block, CompiledBlock) for block in steps.blocks]
    assert compiled == [case != "experts"] * 2


def test_draws_by_graphs_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the same filters, others, and more filters than may have a graph."""

    def capture(work: Callable[[], object]) -> SimpleNamespace:
        work()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(token_step, "capture_graph", capture)
    monkeypatch.setattr(token_step, "MOST_DRAWS", 3)
    model, prompts = build(), prompts_of(5, 9, 20)
    plain, engine = (Engine[GenerationRequest](model, VOCAB, 64, 3) for _ in range(2))
    steps = engine._token_step = TokenStep(model, engine.cache)
    steps.uses_graphs = True
    mixed = [Sampling(0.7, seed=5), Sampling(0), Sampling(1.3, top_k=7, seed=1)]
    batches = [[Sampling(t, top_p=0.9, seed=3)] * 3 for t in (0.5, 1.0, 1.5, 0.0)]
    for batch in [*batches, mixed] * 2:
        texts = []
        for each in (plain, engine):
            pairs = enumerate(zip(prompts, batch, strict=True))
            requests = [GenerationRequest(n, *pair) for n, pair in pairs]
            each.join(requests)
            for _ in range(MOST):
                each.step()
            texts.append([(request.new, request.logprobs) for request in requests])
            for request in requests:
                each.leave(request)
        assert texts[0] == texts[1]
    assert set(steps.draws) == {(3, batch[0].filters) for batch in batches[:3]}


def test_weights_of_one_product_stay_the_models_own() -> None:
    """Values that are written into the model reach the products; weights that are exchanged make
    them anew."""
    model, prompts = build(qkv_bias=True), prompts_of(5)
    engine = Engine[GenerationRequest](model, VOCAB, 64, 1)
    for change in ("none", "values", "memory"):
        for parameter in model.parameters() if change != "none" else ():
            new = parameter + 0.1 * torch.randn_like(parameter)
            if change == "values":
                parameter.copy_(new)
            else:
                parameter.data = new
        engine.forget()
        request = GenerationRequest(0, prompts[0], GREEDY)
        engine.join([request])
        while len(request.new) < MOST:
            engine.step()
        engine.leave(request)
        assert request.new == without_cache(model, prompts[0], MOST, 64)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    TokenStep(model, engine.cache)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("window", [1, 16])
def test_a_text_may_outgrow_the_window(window: int) -> None:
    model, prompts = build(), prompts_of(3, 16, 40)
    expected = [without_cache(model, prompt, MOST, window) for prompt in prompts]
    assert with_cache(model, prompts, window, 2) == expected


FILTERS = [
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_k=500),
    Sampling(top_p=0.6),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.3),
    Sampling(temperature=1.7, top_k=30, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_equal_those_of_transformers(sampling: Sampling) -> None:
    import transformers

    torch.manual_seed(0)
    logits = 3 * torch.randn(4, VOCAB)
    wanted = transformers.TemperatureLogitsWarper(sampling.temperature)(None, logits.clone())
    if sampling.top_k:
        wanted = transformers.TopKLogitsWarper(sampling.top_k)(None, wanted)
    if sampling.top_p < 1:
        wanted = transformers.TopPLogitsWarper(sampling.top_p)(None, wanted)
    if sampling.min_p:
        wanted = transformers.MinPLogitsWarper(sampling.min_p)(None, wanted)
    chances, ids = filter_probabilities(logits, sampling, logits.shape[1])
    if ids is not None:
        chances = torch.zeros_like(logits).scatter(1, ids, chances)
    chances = chances / chances.sum(-1, keepdim=True)
    torch.testing.assert_close(chances, wanted.softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9)], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    count = 20_000
    logits = torch.tensor([[-torch.inf, 2.0, 0.0, 1.0, -3.0, -torch.inf]])
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0))
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])  # the first and the last that there are
    drawn = Counter(
        sample_tokens(logits.expand(count, -1), sampling, uniform, logits.shape[1])[0].tolist()
    )
    chances, ids = filter_probabilities(logits, sampling, logits.shape[1])
    chances = chances if ids is None else torch.zeros_like(logits).scatter(1, ids, chances)
    for token, chance in enumerate((chances / chances.sum()).flatten().tolist()):
        assert drawn[token] / count == pytest.approx(chance, abs=0.01)
        assert (drawn[token] > 0) == (chance > 0)


def pieces(ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(ByteTokenizer(), list(b"prompt "), stop)
    result = []
    for token in ids:
        if stream.stopped:
            break
        result.append(stream.add(token))
    return [*result, stream.end()]


def test_a_character_is_shown_when_it_is_complete() -> None:
    text = "näh €𝄞!"
    given = pieces(list(text.encode()))
    assert "".join(given) == text and "€" in given and not any("\ufffd" in one for one in given)
    assert "".join(pieces([0xFF, 0xFF, 65, 0xE2, 0x82])) == "\ufffd\ufffdA\ufffd"


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    given = pieces(list(b"one END two ENDING"), ("ENDING", "quit"))
    assert "".join(given) == "one END two "
    assert given[:5] == ["o", "n", "e", " ", ""] and given[7] == "END "
    assert "".join(pieces(list(b"one END two"), ("ENDING",))) == "one END two"
    assert "".join(pieces(list(b"a END"), ("ENDING",))) == "a END"


def test_pieces_of_a_vocabulary_with_spaces() -> None:
    """A tokenizer whose decoder drops the first space of what it is given."""

    class Words(ByteTokenizer):
        words = (" one", " two", " three")

        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            return "".join(self.words[i] for i in ids).removeprefix(" ")

    stream = TextStream(Words(), [0], ())
    assert [stream.add(1), stream.add(2), stream.end()] == [" two", " three", ""]


def test_pieces_make_the_whole_text() -> None:
    tokenizer, model = ByteTokenizer(), build(vocab_size=257)
    prompts = [list(b"first"), list(b"the second"), list(b"3")]
    sampling = Sampling(seed=4, max_tokens=50)
    engine = Engine[Text](model, 257, 64, 2)
    texts, order = ["", "", ""], []
    for piece in generate_texts(engine, tokenizer, {256}, prompts, sampling):
        texts[piece.prompt] += piece.text
        order.append(piece.prompt)
    assert all(texts) and {0, 1} == set(order[:4]) and order[-1] == 2
    assert any(a != b for a, b in pairwise(order[:40]))  # they take turns


def alone(model: Decoder, number: int, prompt: list[int], sampling: Sampling) -> GenerationRequest:
    """A text that is generated by itself."""
    request = GenerationRequest(number, prompt, sampling)
    engine = Engine[GenerationRequest](model, VOCAB, 64, 1)
    engine.join([request])
    while len(request.new) < sampling.max_tokens:
        engine.step()
    return request


@pytest.mark.parametrize("slots", [2, 3, 16])
def test_a_prompt_is_read_once_for_all_samples_of_it(slots: int) -> None:
    """Samples that join later find it in the row of one that is still there, or has just left."""
    model, sampling = build(), Sampling(seed=7, max_tokens=9)
    ours, others = prompts_of(20, 13)
    engine = Engine[Text](model, VOCAB, 64, slots)
    texts = Texts(engine)
    requests = [Text(n, ours, sampling, ByteTokenizer(), ()) for n in range(6)]
    requests.append(Text(6, others, sampling, ByteTokenizer(), ()))
    texts.waiting.extend(requests)
    while texts.busy:
        list(texts.turn())
    assert engine.prefilled == 20 + 13
    for request in requests:
        single = alone(model, request.number, [*request.prompt], sampling)
        assert request.new == single.new and len(set(request.new)) > 3
        assert request.logprobs == pytest.approx(single.logprobs, abs=1e-5)
    assert len({tuple(request.new) for request in requests}) == 7


def expected_logprobs(model: Decoder, request: GenerationRequest) -> list[float]:
    """Of a full forward pass over the text, under its temperature and filters."""
    tokens, begin = [*request.prompt, *request.new], len(request.prompt)
    logits = model(torch.tensor([tokens]))[0, begin - 1 : -1, :VOCAB]
    if request.sampling.temperature == 0:
        chances, ids = logits.softmax(-1), None
    else:
        chances, ids = filter_probabilities(logits, request.sampling, logits.shape[1])
    if ids is not None:
        chances = torch.zeros_like(logits).scatter(1, ids, chances)
    chances = (chances / chances.sum(-1, keepdim=True)).log()
    return chances.gather(1, torch.tensor(request.new)[:, None]).squeeze(1).tolist()


def test_logprobs_are_those_of_a_full_forward_pass() -> None:
    """Rows of one batch with temperatures and filters of their own."""
    model, prompt = build(sliding_window=9), prompts_of(12)[0]
    wanted = [replace(one, max_tokens=MOST, seed=3) for one in [*FILTERS, GREEDY, Sampling()]]
    requests = [GenerationRequest(n, prompt, sampling) for n, sampling in enumerate(wanted)]
    engine = Engine[GenerationRequest](model, VOCAB, 64, len(requests))
    engine.join(requests)
    while len(requests[-1].new) < MOST:
        for request in engine.step():
            if len(request.new) == MOST:
                engine.leave(request)
    for request in requests:
        assert request.logprobs == pytest.approx(expected_logprobs(model, request), abs=1e-4)
        assert request.new == alone(model, request.number, prompt, request.sampling).new


def test_texts_go_on_with_new_weights() -> None:
    """What they drew before stays, and what they draw now is the new model's alone."""
    old, new = build(), build()
    for parameter in new.parameters():
        parameter.mul_(1.1)
    texts = Texts(Engine[Text](old, VOCAB, 64, 2))
    sampling = Sampling(max_tokens=12)
    requests = [Text(n, [5, 6, 7], sampling, ByteTokenizer(), ()) for n in range(3)]
    texts.waiting.extend(requests)
    while len(requests[0].new) < 5:
        list(texts.turn())
    old.load_state_dict(new.state_dict())
    texts.read_again()
    texts.engine.version = 4
    while texts.busy:
        list(texts.turn())
    assert [request.versions for request in requests] == [[0, 4], [0, 4], [4]]
    for request, kept in zip(requests, (5, 4, 0), strict=True):
        expected = expected_logprobs(old, request)
        assert request.logprobs[kept:] == pytest.approx(expected[kept:], abs=1e-4)
        assert kept == 0 or request.logprobs[0] != pytest.approx(expected[0], abs=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case != "experts"])
def test_fixed_shapes_give_the_same_to_the_last_bit(case: str) -> None:
    """Alone, among others that come and go, and from a row that is read already."""
    model, sampling = build(**CASES[case]), Sampling(max_tokens=MOST, seed=3)
    prompt, *others = prompts_of(5, 3, 9, 12, 4, 7, 2)

    def run(before: int, beside: int) -> GenerationRequest:
        engine: Engine[GenerationRequest] = Engine(model, VOCAB, 64, 8, fixed=True)
        engine.join([GenerationRequest(9, each, sampling) for each in others[:before]])
        for _ in range(before):
            engine.step()
        mine = GenerationRequest(0, prompt, sampling)
        engine.join([GenerationRequest(1, prompt, sampling)] * (beside > 1) + [mine])
        while len(mine.new) < MOST:
            engine.step()
            if len(mine.new) == 3 and beside:
                engine.join([GenerationRequest(8, others[4], sampling)])
            for each in [each for each in engine.requests if len(each.new) == MOST]:
                engine.leave(each)
        return mine

    found = [run(before, beside) for before, beside in ((0, 0), (1, 0), (4, 1), (3, 2))]
    assert all(each.new == found[0].new for each in found)
    assert all(each.logprobs == found[0].logprobs for each in found)
