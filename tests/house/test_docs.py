"""What the pages say of each other and of the options."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

from kempner.config.option import whole_schema
from kempner.train.sections import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = whole_schema(RunConfig)
OPTION = r"^(?:--)?([a-z_.]+)\.([a-z_-]+)\b(?!/)"
TITLES = {page.read_text().splitlines()[0].lstrip("# ").lower() for page in PAGES[1:]}


def rows(page: str) -> list[list[str]]:
    """The cells of all its tables."""
    lines = (ROOT / page).read_text().splitlines()
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if len(row) == 3 and row[0] not in ("There", "---")]


def test_the_options_of_the_other_kits_become_options_that_exist() -> None:
    cells = [row[1] for row in rows("docs/start/coming-from.md")]
    words = [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    named = [m for word in words for m in re.findall(OPTION, word)]
    known = {
        (section, key.replace("-", "_"))
        for section, key in named
        if section in SECTIONS and key != "sh"
    }
    assert len(known) > 30
    assert [x for x in known if x[1] not in SECTIONS[x[0]]] == []
    lists = {"rl.env", "freeze.stages"}
    tables = {table for word in words for table in re.findall(r"^\[+([a-z_.]+)\]+$", word)}
    assert {"rl.deployment", "rl.loss", "rl.sampling", "rl.env"} <= tables
    assert tables <= {*SECTIONS, *lists}


def test_no_page_denies_what_another_describes() -> None:
    """The page for users of other kits told those of RL to stay with theirs."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            denies = re.search(r"not built(?! for)|no counterpart here|stay with", line, re.I)
            said = line.lower() if denies else ""
            assert not [title for title in TITLES if title in said], (page.name, line)
            named = re.findall(r"`\[+([a-z_.]+)\]+`", said)
            assert not {*named} & {*SECTIONS}, (page.name, line)


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them, and the anchors that the page sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def test_each_link_leads_somewhere() -> None:
    assert len(PAGES) >= 40
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]:
        for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text()):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


def test_each_page_that_a_program_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    named = 0
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        path = ROOT / name
        if path.suffix in (".png", ".json", ".xz") or not path.is_file():
            continue
        for page in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png|json)\b", path.read_text()):
            assert (ROOT / page).exists(), (name, page)
            named += 1
    assert named > 100


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / link).resolve()
        for link in re.findall(r"\]\(([\w/.-]+\.md)", index.read_text())
    }
    assert [page.name for page in PAGES[1:] if page != index and page not in linked] == []


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_lines_that_the_readme_counts() -> None:
    """Thousands of lines, counted again."""
    if not (ROOT / "src/kempner/jobs").exists():
        pytest.skip("the package has its earlier layout")
    said = [
        int(n) for n in re.findall(r"about ([\d,]+),000 lines", (ROOT / "README.md").read_text())
    ]
    library = ROOT / "src/kempner"
    kit = ["jobs", "config"]
    trainer = ["train", "model", "data", "parallel", "optim", "checkpoint"]
    counted = [
        count_lines([ROOT / "scripts/slurm"], "*.sh"),
        count_lines([library / name for name in kit], "*.py"),
        count_lines([library / name for name in trainer], "*.py"),
        count_lines([library / "extensions"], "*.py"),
    ]
    for thousands, lines in zip(said, counted, strict=True):
        assert abs(thousands * 1000 - lines) <= 1000, (said, counted)


def count_lines(folders: list[Path], pattern: str) -> int:
    files = (file for folder in folders for file in folder.rglob(pattern))
    return sum(len(file.read_text().splitlines()) for file in files)


def test_each_test_that_guarantees_a_promise_exists() -> None:
    page = (ROOT / "docs/reference/guarantees.md").read_text()
    promises = [line for line in page.splitlines() if line.startswith("| ")]
    promises = [line for line in promises if not line.startswith("| Promise")]
    assert len(promises) > 50
    for promise in promises:
        named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", promise)
        assert named, promise
        for name, function in named:
            path = ROOT / name
            assert path.exists(), promise
            tests = find_tests(path)
            assert function in tests if function else tests, promise


def find_tests(path: Path) -> set[str]:
    """The names of the tests in a file, or in the files of a directory."""
    files = [path] if path.is_file() else path.rglob("test_*.py")
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_test_of_a_fault_exists() -> None:
    page = (ROOT / "docs/guide/resilience.md").read_text()
    tests = sorted(find_tests(ROOT / "tests"))
    named = set(re.findall(r"`(test_\w+\*?)`", page))
    assert len(named) > 30
    assert [x for x in sorted(named) if not fnmatch.filter(tests, x)] == []


def test_the_modules_and_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        paths = re.findall(r"`((?:src/kempner|scripts|configs|benchmarks)/[\w/.-]+)`", text)
        if page.name == "coming-from.md":  # has the other kits' as well
            paths = []
        paths = [
            path for path in paths if Path(path).name not in ("mine.sh", "own.sh")
        ]  # the user's
        assert [path for path in paths if not (ROOT / path).exists()] == [], page.name
        for name in re.findall(r"\bkempner(?:\.[a-z_]+)+", text):
            path = ROOT / "src" / name.replace(".", "/")
            modules = [path.with_suffix(".py"), path.parent.with_suffix(".py")]
            assert path.is_dir() or any(x.exists() for x in modules), (page.name, name)
