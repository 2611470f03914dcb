"""The commands that README.md and docs/ print, and what stands in for what only a reader has.

    python -m tests.pages          # how many there are, and how each is tested

On a page an indented block is commands; all other blocks are fenced. A comment before a block says
what it takes:

    <!-- needs: A, B -->           STAND_INS makes A and B; NEEDS has those that change the typing
    <!-- typed by: FILE -->        a test of the page's topic types it
    <!-- not typed: REASON -->
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
ACTIVATE = ". .venv/bin/activate"
NEEDS = {
    "cluster": "sbatch and srun are those of a test bed, with small configurations",
    "dry run": "sbatch is the script's own --dry-run: the job is larger than any test bed",
    "fake:": "random tokens are the data: a corpus would have to be a large one",
    "small": "the configurations are small ones",
    "time": "hours, or GPUs: --help has each option, the Makefile each target",
    "Ctrl-C": "a command that goes on until Ctrl-C gets one after seconds",
    "JOBID": "the number of a running job",
}
TINY = (
    "configs/train/debug.toml --model.dim=16 --model.n_layers=1 --model.ffn_dim=32"
    " --train.seq_len=32 --train.global_batch=2 --metrics.log_interval=1 --eval.interval=0"
    " --data.dataset_path=data/stdlib"
)


def trained(steps: int, name: str, words: str = TINY, launcher: str = "python") -> str:
    return (
        f"{launcher} scripts/train.py {words} --train.max_steps={steps} --run.dir=runs/{name}"
        " --checkpoint.interval=0 >/dev/null"
    )


CHAT = (
    "configs/train/sft.toml --train.seq_len=64 --train.global_batch=1 --train.micro_batch=1"
    " --no-train.compile --train.dtype=fp32"
)
PREPARE = "python scripts/prepare_data.py"
# What makes each, in bash, in the repository's copy. A stand-in may need those that come before it.
STAND_INS = {
    "corpus/": "mkdir corpus && cp -r docs/*/*.md src tests corpus && rm -r corpus/tests/fixtures",
    # A sample of the largest configuration takes 8,193 tokens, also of the validation data.
    "data/corpus": f"{PREPARE} corpus/ --out data/corpus --train-bpe 32000 --val-fraction 0.1",
    "data/stdlib": f"{PREPARE} --source stdlib --out data/stdlib",
    "more.jsonl": """echo '{"text": "one more document"}' >more.jsonl""",
    "web/": """mkdir web && python -c 'import pyarrow as a, pyarrow.parquet as p
p.write_table(a.table({"text": ["of the web"] * 9}), "web/one.parquet")'""",
    "llama3/": "mkdir llama3 && cp data/corpus/tokenizer.json llama3",
    "runs/7b": trained(4, "7b", f"{TINY} --train.global_batch=4", "torchrun --nproc-per-node=4"),
    "runs/7b/logs/batch-1.log": "echo 'kempner: end: done' >runs/7b/logs/batch-1.log",
    "runs/a": trained(2, "a"),
    "runs/b": trained(2, "b"),
    "runs/debug": trained(10, "debug", "configs/train/debug.toml"),
    "runs/quickstart": trained(4, "quickstart"),
    "runs/arithmetic": "bash scripts/slurm/rl.sh configs/rl/arithmetic.toml --train.max_steps=1",
    "runs/70b@1000": trained(1000, "70b"),
    "scratch/": "mkdir scratch && cp -a runs/7b scratch/7b",
    "models/llama": "python -m tests.page_model models/llama",
    "models/base": "python -m tests.page_model models/base",
    "chats.jsonl": """for i in {1..60}; do
    echo '{"prompt": "'$i' plus '$i'", "completion": "'$((2 * i))'"}'
done >chats.jsonl""",
    "data/chat": f"{PREPARE} chats.jsonl --out data/chat --kind chat --tokenizer models/llama",
    "data/preferences": """for i in {1..60}; do
    echo '{"prompt": "'$i' plus '$i'", "chosen": "'$((2 * i))'", "rejected": "no"}'
done >pairs.jsonl
python scripts/prepare_data.py pairs.jsonl --out data/preferences --kind preference \\
    --tokenizer models/llama""",
    "runs/sft@1000": trained(1000, "sft", CHAT),
    "data/gsm8k.jsonl": """for i in {1..60}; do
    echo '{"question": "'$i' plus '$i'?", "answer": "#### '$((2 * i))'"}'
done >data/gsm8k.jsonl""",
    "runs.txt": "for i in {1..10}; do echo configs/train/debug.toml; done >runs.txt",
    "site.d/NAME.env": "echo SBATCH_PARTITION=gpu >site.d/NAME.env",
    "my_train.py": "echo 'print(1)' >my_train.py",
    "serve_with_vllm.py": "echo 'print(1)' >serve_with_vllm.py",
    "train.py": "mkdir -p conf && touch conf/base.yaml && echo 'print(1)' >train.py",
    "driver.py": "echo 'import ray; ray.init(); print(ray.nodes())' >driver.py",
}
# What a stand-in is made of.
OF = {
    "data/corpus": ["corpus/"],
    "llama3/": ["data/corpus"],
    "scratch/": ["runs/7b"],
    "data/chat": ["chats.jsonl", "models/llama"],
    "data/preferences": ["models/llama"],
    "runs/sft@1000": ["data/chat"],
    "runs/7b": ["data/stdlib"],
    "runs/7b/logs/batch-1.log": ["runs/7b"],
    "runs/a": ["data/stdlib"],
    "runs/b": ["data/stdlib"],
    "runs/debug": ["data/stdlib"],
    "runs/quickstart": ["data/stdlib"],
    "runs/70b@1000": ["data/stdlib"],
}


@dataclass(frozen=True)
class Block:
    """Commands that stand together on a page."""

    page: str
    line: int
    text: str
    needs: tuple[str, ...] = ()
    typed_by: str = ""
    not_typed: str = ""
    shown: str = ""  # what the page prints below the command of a console block

    @property
    def commands(self) -> list[str]:
        """One a command, without comments; a loop is one."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        found: list[str] = []
        for line in lines:
            if line.startswith(" ") or re.match(r"(do|done)\b", line):
                found[-1] += f"\n{line}"
            elif not re.match(r"\s*(#|$)", line):
                found.append(re.sub(r"\s+# .*", "", line))
        return found

    @property
    def how(self) -> str:
        if self.not_typed:
            return "not typed"
        if self.typed_by:
            return "typed by another test"
        if "time" in self.needs:
            return "typed with --help"
        return "typed with stand-ins" if self.needs else "typed as they are"

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


BLOCK = re.compile(
    r"""^(?:<!--\ (?P<mark>.*)\ -->\n\n)?
    (?:(?P<indent>\ *)```(?P<language>\w*)\n(?P<fenced>(?s:.*?))^(?P=indent)```$
     | (?<=\n\n)(?P<text>(?:\ {4}.*\n+)+))""",
    re.MULTILINE | re.VERBOSE,
)


def blocks(page: str) -> list[Block]:
    """The commands of a page, in order."""
    found: list[Block] = []
    whole = (ROOT / page).read_text()
    for match in BLOCK.finditer(whole):
        name = "text" if match["text"] else "fenced"
        line = whole.count("\n", 0, match.start(name)) + 1
        if match["text"]:
            text = textwrap.dedent(match["text"]).strip() + "\n"
            found.append(Block(page, line, text, **read(match["mark"] or "", page)))
        elif match["language"] == "console":
            command, _, shown = match["fenced"].partition("\n")
            found.append(Block(page, line, command.removeprefix("$ "), shown=shown))
    return found


def read(mark: str, page: str) -> dict[str, object]:
    """A mark as fields of Block."""
    kind, _, rest = mark.partition(": ")
    if kind == "needs":
        needs = tuple(rest.split(", "))
        unknown = set(needs) - STAND_INS.keys() - NEEDS.keys()
        assert not unknown, f"{page}: nothing stands in for {unknown}"
        return {"needs": needs}
    if kind == "typed by":
        return {"typed_by": rest}
    assert not mark or kind == "not typed", f"{page}: <!-- {mark} -->"
    return {"not_typed": rest}


def stand_ins(needs: tuple[str, ...]) -> list[str]:
    """The names in STAND_INS, each after those that it is made of."""
    found: list[str] = []
    for name in needs:
        if name in STAND_INS:
            found += [x for x in (*stand_ins(tuple(OF.get(name, ()))), name) if x not in found]
    return found


def main() -> None:
    counts: Counter[str] = Counter()
    for page in PAGES:
        for block in blocks(page):
            counts[block.how] += len(block.commands)
            if block.not_typed:
                print(f"{block.where}: {len(block.commands)} not typed: {block.not_typed}")
    print(f"{sum(counts.values())} commands on {len(PAGES)} pages:")
    print("\n".join(f"{count:5} {how}" for how, count in counts.most_common()))


if __name__ == "__main__":
    main()
