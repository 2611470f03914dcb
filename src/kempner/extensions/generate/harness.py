"""Our models under lm-evaluation-harness (EleutherAI), without an export."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import lm_eval.tasks
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from kempner.config.option import ConfigError
from kempner.extensions.generate.config import Sampling
from kempner.extensions.generate.engine import Engine
from kempner.extensions.generate.load import Loaded
from kempner.extensions.generate.texts import Text, generate_texts
from kempner.extensions.generate.whole_texts import chunk_logits, run_all_blocks
from kempner.model.cache import whole_blocks

Scored = tuple[list[int], list[int]]  # context and continuation, as tokens
MOST_NEW = 256  # tokens of a generated answer if the task sets no limit


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model for the harness. A context begins after the tokens `begin`, as in training."""

    def __init__(self, loaded: Loaded, batch: int) -> None:
        """`batch`: texts at a time. A context longer than the window loses its beginning."""
        super().__init__()
        self.model, self.window, self.batch = loaded.model, loaded.window, batch
        self.text, self.begin, self.ends, _ = loaded.words

    @property
    def eot_token_id(self) -> int:
        return self.text.eod

    @property
    def prefix_token_id(self) -> int:
        return self.begin[-1] if self.begin else self.text.eod

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        return self.text.encode_prompt(string)  # a context may spell a chat's template out

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return self._score([(self._begun(context), rest) for _, context, rest in requests])

    def _begun(self, context: list[int]) -> list[int]:
        # The harness itself passes this token if a task has no context.
        return context if context == [self.prefix_token_id] else [*self.begin, *context]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Return the log-likelihood of whole texts: each token counts once, within windows."""
        pairs: list[Scored] = []
        of: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.window, 1)
            found = list(map(make_disjoint_window, windows))
            pairs += found
            of += [number] * len(found)
        sums = [0.0] * len(requests)
        for number, (value, _greedy) in zip(of, self._score(pairs), strict=True):
            sums[number] += value
        return sums

    @torch.inference_mode()
    def _score(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return, for each pair, the sum of log p(continuation | context), and whether greedy
        decoding gives the continuation. The longest pairs run first: low memory shows at once."""
        device = self.model.embed.weight.device
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            # One more than the window: the last token is only a target.
            rows = [[*pairs[i][0], *pairs[i][1]][-self.window - 1 :] for i in numbers]
            width = whole_blocks(len(rows[0]) - 1, self.window)
            # padded at the end: in a causal model later tokens change nothing
            inputs = [row[:-1] + [0] * (width + 1 - len(row)) for row in rows]
            outputs = run_all_blocks(self.model, torch.tensor(inputs, device=device))  # [B, T, D]
            for i, row, x in zip(numbers, rows, outputs, strict=True):
                first = len(row) - min(len(pairs[i][1]), len(row) - 1)
                targets = torch.tensor(row[first:], device=device)  # [count]
                scores[i] = self._score_targets(x[first - 1 : len(row) - 1], targets)
        return [scores[i] for i in range(len(pairs))]

    def _score_targets(self, x: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Score the tokens that follow the last block's output x [count, D]."""
        total, likeliest = 0.0, True
        for logits, labels in chunk_logits(self.model, x, targets):
            total += float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())
            greedy = logits[:, : self.text.vocab_size].argmax(-1)  # as in generation
            likeliest &= bool((greedy == labels).all())
        return total, likeliest

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """Generate texts up to one of the strings that each task names; requests with equal
        sampling run together."""
        groups: dict[Sampling, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[_sampling(request.args[1])].append(number)
        texts = [""] * len(requests)
        for sampling, numbers in groups.items():
            prompts = [
                [*self.begin, *self.tok_encode(requests[number].args[0])] for number in numbers
            ]
            slots = min(self.batch, len(prompts))
            longest = max(map(len, prompts)) + sampling.max_tokens
            # The cache is no longer than needed: one of the whole window may not fit.
            window = whole_blocks(longest, self.window)
            engine = Engine[Text](self.model, self.text.vocab_size, window, slots)
            for piece in generate_texts(engine, self.text, self.ends, prompts, sampling):
                texts[numbers[piece.prompt]] += piece.text
        return texts


def _sampling(options: dict[str, Any]) -> Sampling:
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    samples = options.get("do_sample", False)
    return Sampling(
        temperature=float(options.get("temperature", 1.0)) if samples else 0.0,
        top_k=options.get("top_k") if samples else None,
        top_p=float(options.get("top_p", 1.0)) if samples else 1.0,
        max_tokens=int(options.get("max_gen_toks", MOST_NEW)),
        stop=tuple(text for text in stop if text),
    )


def _manager(tasks: Sequence[str], include: list[str]) -> Any:
    """Make lm-eval's index of tasks: from the given directories if they have all of them, because
    listing its own 15,000 takes half a minute. Raises ConfigError for an unknown task."""
    missing = list(tasks)
    for defaults in (False, True) if include else (True,):
        manager = lm_eval.tasks.TaskManager(include_path=include, include_defaults=defaults)
        missing = [task for task in tasks if not manager.match_tasks([task])]
        if not missing:
            return manager
    raise ConfigError(
        f"--tasks {','.join(missing)}: lm-eval has no such task; `lm-eval ls tasks` lists them, "
        "and --include-path DIR adds those of a directory"
    )


def run_harness(
    model: HarnessModel,
    tasks: Sequence[str],
    include: Iterable[str],
    fewshot: int | None,
    limit: int | None,
) -> tuple[dict[str, float], str]:
    """Return the figures as task/metric, and the harness's own table. Raises ConfigError for an
    unknown task."""
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    # Otherwise it forks for the standard errors, and waits for ever for a child that ignores
    # SIGTERM, as a fork of this process may. It has only one chunk of work for them.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    manager = _manager(tasks, list(include))
    found = simple_evaluate(
        model,
        tasks=manager.match_tasks(list(tasks)),
        num_fewshot=fewshot,
        limit=limit,
        # One chunk: lm-eval's default is 100 chunks, one after the other in one process.
        bootstrap_iters=1000,
        log_samples=False,
        task_manager=manager,
    )
    assert found is not None
    figures = {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and name.split(",")[0] not in ("alias", "sample_len")
    }
    return figures, make_table(found)
