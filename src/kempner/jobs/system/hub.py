"""The Hugging Face Hub, through huggingface-hub: its cache, its resumable transfers, its settings
(HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN)."""

from __future__ import annotations

import contextlib
import difflib
import glob
import re
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.jobs.system.front_door import how_to_run

REPO = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")  # OWNER/NAME, OWNER/NAME@REVISION
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip
# Files that accompany the weights from a model to a run and from a run to an export.
CARRIED = ("config.json", "generation_config.json", *TOKENIZER_FILES)
HF_DATA = "hf://datasets/"
DATA = re.compile(rf"{HF_DATA}(\w[\w.-]*/\w[\w.-]*?)(?:@([\w.-]+))?/(.+)")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
USUAL = ("runs", "models")  # directories of this kit, not owners of models
SHOWN_DIRECTORIES = 5  # directories named in a message


def hub_snapshot(name: str, download: bool, weights: bool = True) -> Path:
    """Return the directory of a model in the local cache. `download`: update it first, and resume
    an interrupted download. Without `weights`, only its tokenizer and configuration.

    Raises ConfigError if `name` is not a model id or the model is not there.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    _refuse_path(name, name.rpartition("@")[0] or name)
    repo, revision = _parsed(name)
    words = "" if weights else "--tokenizer-only "
    try:
        path = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[*CARRIED, *(WEIGHTS if weights else ())],
            local_files_only=not download,
        )
    except LocalEntryNotFoundError as error:
        cache = huggingface_hub.constants.HF_HUB_CACHE
        why = f" ({_first_line(error.__cause__ or error)})" if download else ""
        raise ConfigError(
            f"{name}: not in the cache of the hub, {cache}{why}; on a machine with network run "
            f"`{how_to_run('convert.py')} prefetch {words}{name}`, with HF_HOME on a file system "
            "that the nodes share"
        ) from None
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(f"{name}: {_first_line(error)}") from None
    return Path(path)


def data_files(path: str, download: bool) -> str:
    """Return the files `hf://datasets/OWNER/NAME[@REVISION]/PATTERN` in the local cache.
    `download`: update them first. If files are missing, returns `path`, for reading over the
    network, unless HF_HUB_OFFLINE forbids it.

    Raises ConfigError if `path` is malformed or the files are not available.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if (found := DATA.fullmatch(path)) is None:
        raise ConfigError(f"{path}: give hf://datasets/OWNER/NAME[@REVISION]/FILES")
    repo, revision, pattern = found.groups()
    try:
        root = huggingface_hub.snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[pattern],
            local_files_only=not download,
        )
        files = str(Path(root, pattern))
        if glob.glob(files, recursive=True):
            return files
        why = "it has no such files"
    except LocalEntryNotFoundError as error:
        why = _first_line(error.__cause__ or error)
    except (HfHubHTTPError, ValueError, OSError) as error:
        why = _first_line(error)
    if download:
        raise ConfigError(f"{path}: {why}")
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        return path
    raise ConfigError(
        f"{path}: not in the cache of the hub, {huggingface_hub.constants.HF_HUB_CACHE}; on a "
        f"machine with network run `{how_to_run('convert.py')} prefetch CONFIG`, with HF_HOME on a "
        "file system that the nodes share"
    )


def push_to_hub(directory: Path, name: str, private: bool) -> str:
    """Upload a directory as a model, which is created if needed. Run again, it resumes an
    interrupted upload. Returns the address. Raises ConfigError."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    repo, revision = _parsed(name)
    try:
        huggingface_hub.create_repo(repo, private=private, exist_ok=True)
        done = huggingface_hub.upload_folder(
            repo_id=repo,
            folder_path=directory,
            revision=revision,
            commit_message="Upload model",
        )
    except OfflineModeIsEnabled:
        raise ConfigError(f"{name}: HF_HUB_OFFLINE is set; unset it to upload") from None
    except (HfHubHTTPError, ValueError) as error:
        raise ConfigError(f"{name}: {_first_line(error)}; log in by `hf auth login`") from None
    except Exception as error:  # of its transfer package, which depends on its version
        fix = "upload where there is a network"
        raise ConfigError(
            f"{name}: the hub does not answer ({_first_line(error)}); {fix}"
        ) from None
    return str(done.commit_url)


def _refuse_path(name: str, repo: str) -> None:
    """Raise ConfigError for a missing path: RUN and DIR look like OWNER/NAME, and a name below an
    existing directory is meant as a path."""
    path = Path(repo)
    if path.is_dir():
        raise ConfigError(
            f"{name}: {name.rpartition('@')[2]} is not a step; name one, as {repo}@250"
        )
    if path.parent == Path("."):
        return  # perhaps the name of a model without its owner
    if path.parent.is_dir() or path.parent.name in USUAL:
        with contextlib.suppress(OSError):
            there = sorted(str(other) for other in path.parent.iterdir() if other.is_dir())
            near = difflib.get_close_matches(repo, there, 1)
            names = ", ".join(
                [*near, *(other for other in there if other not in near)][:SHOWN_DIRECTORIES]
            )
            raise ConfigError(f"{name}: no such directory; there are {names or 'none'}")
        raise ConfigError(
            f"{name}: no such directory, and no directory {path.parent}; train that model first, "
            "or name another one"
        )


def _parsed(name: str) -> tuple[str, str | None]:
    if found := REPO.fullmatch(name):
        return found[1], found[2]
    raise ConfigError(
        f"{name}: no such directory, and not the id of a model on the hub (OWNER/NAME[@REVISION])"
    )


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[Errno -?\d+\] ", "", line)
