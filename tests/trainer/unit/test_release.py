"""What a release says of itself: version and licence, the same in all files and in the newest
tag."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import tomli

import kempner

ROOT = Path(__file__).parents[3]
VERSION = r"(\d+\.\d+\.\d+)"
RELEASES = re.findall(
    rf"^## \[{VERSION}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
)


def number(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared."""
    return tuple(map(int, version.split(".")))


def cited(key: str) -> str:
    """The value of a top-level key of CITATION.cff, which is YAML, without a parser of YAML."""
    found = re.search(rf'^{key}: "?([^"\n]+)"?$', (ROOT / "CITATION.cff").read_text(), re.M)
    assert found, f"CITATION.cff has no {key}"
    return found[1]


def test_the_changelog_and_the_citation_name_this_version() -> None:
    assert RELEASES[0] == (kempner.__version__, cited("date-released"))
    assert cited("version") == kempner.__version__
    versions = [number(version) for version, _ in RELEASES]
    assert versions == sorted(set(versions), reverse=True)


def test_the_newest_tag_is_no_newer_than_this_version_and_is_in_the_changelog() -> None:
    git = ["git", "-C", str(ROOT), "tag", "--list", "v*", "--merged", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no git")
    tags = [number(tag[1:]) for tag in done.stdout.split() if re.fullmatch(f"v{VERSION}", tag)]
    if done.returncode or not tags:
        pytest.skip("this copy has no tags")
    assert max(tags) <= number(kempner.__version__)
    assert max(tags) in [number(version) for version, _ in RELEASES]


def test_the_license_is_the_same_in_all_files() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["license"] == cited("license") == "MIT"
    [name] = project["project"]["license-files"]
    text = (ROOT / name).read_text()
    assert text.startswith("MIT License\n\nCopyright (c) 2026 the kempner authors\n")
    assert project["project"]["authors"] == [{"name": "the kempner authors"}]
    assert "- name: the kempner authors\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_has_the_version_of_the_module() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kempner.__version__"}
