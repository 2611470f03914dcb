"""Other users of a host see every word of every process's command line; teammates read a run
directory. No secret is in either."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import clean_env
from tests.jobs.shell.test_lib import ROOT, bash

SCRIPTS = ROOT / "scripts/slurm"
SECRETS = {
    "KEMPNER_SERVE_TOKEN": "tok3n-a",
    "KEMPNER_WEBHOOK": "https://hooks.example.org/services/s3cret-b",
    "KEMPNER_NOTIFY": "curl -d @- https://example.org/s3cret-c",
    "WANDB_API_KEY": "s3cret-d",
    "HF_TOKEN": "s3cret-e",
}
WORDS = ("tok3n", "s3cret")


def repository(path: Path) -> None:
    for name, text in {
        "train.py": "print(1)",
        "credentials.py": "# code",
        "tracked-secrets.json": '{"test": 1}',
        "site.d/example.env": "SBATCH_ACCOUNT=lab",
        "site.d/mine.env": "KEMPNER_WEBHOOK=s3cret-1",
        "site.env": "HF_TOKEN=s3cret-2",
        ".netrc": "password s3cret-3",
        ".env": "X=s3cret-4",
        "credentials.yaml": "s3cret-5",
        "conf/my-secrets.json": "s3cret-6",
        "credentials": "s3cret-7",
        "keys/id_rsa": "s3cret-8",
        "host.pem": "s3cret-9",
        "hf_token.txt": "s3cret-10",
        "conf/new.toml": "lr = 1",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text + "\n")


COPY = 'KP_ROOT=$REPO; kp_code_copy "$RUN/code" || exit; echo "copy: $KP_COPY"'
CODE = {"train.py", "credentials.py", "conf/new.toml"}


def copied(copy: Path) -> set[str]:
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    return files - {".kempner-origin"}


@pytest.mark.parametrize("git", [True, False], ids=["git", "no git"])
def test_a_copy_of_the_code_has_no_secret(tmp_path: Path, git: bool) -> None:
    repo, run = tmp_path / "repo", tmp_path / "run"
    repository(repo)
    env = {"REPO": str(repo), "RUN": str(run), "HOME": str(tmp_path)}
    tracked = ["train.py", "tracked-secrets.json", "site.d/mine.env", "site.env"]
    if git:
        name = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        for words in (["init", "-q"], ["add", *tracked], [*name, "commit", "-qm", "first"]):
            subprocess.run(["git", "-C", repo, *words], check=True, env=os.environ | env)
        for tracked_file in tracked:  # the difference to the commit is written, too
            with open(repo / tracked_file, "a") as file:
                file.write("# s3cret-11\n" if tracked_file.endswith("env") else "# more\n")
    done = bash(COPY, **env)
    assert done.returncode == 0, done.stderr
    copy = Path(done.stdout.rpartition("copy: ")[2].strip())
    assert copied(copy) == CODE | ({"tracked-secrets.json"} if git else set())
    for path in (run / "code").rglob("*"):
        if path.is_file():
            assert not any(word in path.read_text() for word in WORDS), path
    if git:
        assert "+# more" in copy.with_name(f"{copy.name}.patch").read_text()
        assert "not in the copy of the code, because their names suggest secrets" in done.stdout
        assert "credentials.yaml" in done.stdout
    for path in (run / "code", copy, *copy.parent.glob(f"{copy.name}.*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(run.stat().st_mode) & 0o077  # that of the user's own umask


def test_a_profile_is_read_where_it_is(tmp_path: Path) -> None:
    """Not in the copy; and a run that has trained goes on where it is gone."""
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    (origin / "site.d").mkdir(parents=True)
    copy.mkdir()
    (origin / "site.d/mine.env").write_text("KEMPNER_WEBHOOK=https://example.org/x\n")
    read = 'KP_ROOT=$COPY KP_ORIGIN=$ORIGIN; kp_read_site; echo "${KEMPNER_WEBHOOK:-none}"'
    env = {"COPY": str(copy), "ORIGIN": str(origin), "KEMPNER_SITE": "mine"}
    assert bash(read, **env).stdout == "https://example.org/x\n"
    shutil.rmtree(origin / "site.d")
    done = bash(read, **env)
    assert done.returncode == 0 and done.stdout.endswith("none\n")
    assert "site.d/mine.env is gone" in done.stdout
    done = bash(read, **env | {"COPY": str(origin)})
    assert done.returncode == 2 and "there is no site.d/mine.env" in done.stderr


def test_tmux_is_told_no_secret(tmp_path: Path) -> None:
    """Its server keeps the words of its first client for as long as it lives."""
    run = tmp_path / "runs/one"
    (run / "logs").mkdir(parents=True)
    fake = tmp_path / "bin/tmux"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/bash\n[[ $1 != has-session ]] || exit 1\nprintf "%s\\n" "$@" >>{tmp_path}/said\n'
    )
    fake.chmod(0o755)
    env = clean_env(**SECRETS, KEMPNER_PYTHON="python3", PATH=f"{fake.parent}:{os.environ['PATH']}")
    words = ["bash", SCRIPTS / "tmux.sh", str(run), "--detached"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text()
    assert "KEMPNER_PYTHON=python3" in said and not any(word in said for word in WORDS)


def test_a_ray_shell_takes_no_variable_as_a_word(tmp_path: Path) -> None:
    """The driver and the shells of ray.sh have the environment of Ray, whatever its names are."""
    trace = tmp_path / "trace"
    fake = tmp_path / "bin/env"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >>{trace}\nexec /usr/bin/env "$@"\n')
    fake.chmod(0o755)
    functions = {"BASH_FUNC_module%%": "() {  echo loaded\n}"}
    node = subprocess.Popen(["sleep", "600"], env=SECRETS | functions | {"PATH": "/usr/bin:/bin"})
    try:
        enter = ["bash", SCRIPTS / "lib/ray_enter.sh", str(node.pid), "7", str(tmp_path), "--"]
        ask = 'echo "$WANDB_API_KEY ${MINE-unset}"; module'
        done = subprocess.run(
            [*enter, "bash", "-c", ask],
            env={"PATH": f"{fake.parent}:/usr/bin:/bin", "MINE": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        node.kill()
        node.wait()
    assert done.stdout == "s3cret-d unset\nloaded\n", done.stderr
    assert not trace.exists() or not any(word in trace.read_text() for word in WORDS)


def test_the_key_of_a_start_is_of_that_start_alone() -> None:
    """And no process of a start has it, or another secret, on its command line."""
    script = """
kp_begin
first=$KEMPNER_PEER_KEY
kp_begin
[[ $first =~ ^[0-9a-f]{32}$ && $first != "$KEMPNER_PEER_KEY" ]]
KP_SECRET_NAMES=HF_TOKEN
kp_as_submitted bash -c 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null
echo "${KEMPNER_PEER_KEY-none} ${WANDB_API_KEY-none} ${HF_TOKEN-none}"'
echo "$KEMPNER_PEER_KEY"
"""
    # The script that has made the copy of the code has had one.
    done = bash(script, **SECRETS, KEMPNER_SITE=os.devnull, KEMPNER_PEER_KEY="0" * 32)
    assert done.returncode == 0, done.stderr
    *lines, told, key = done.stdout.splitlines()
    assert key != "0" * 32
    assert told == "none s3cret-d none"
    assert not any(word in line for line in lines for word in (*WORDS[1:], key))


ENGINES = {
    "serve.sh": """
source "$KP_LIB/engines.sh"
kp_need_packages() { :; }
kp_checked() { :; }
kp_job_id() { echo 7; }
KP_ARGUMENTS=(runs/7b) KP_NODES=1 KP_TASKS=1 KP_ROOT=/repo
cd "$PLACE"
kp_engines_check runs/7b
token=runs/serve-7/token
words=("${KP_ARGUMENTS[@]}")
""",
    "rl.sh": """
source "$KP_LIB/rl.sh"
KP_RL=([exchange]=$PLACE/rl/7.0.1 [logs]=$PLACE/logs [serve]=serve.py [kind]=kit [slots]=8)
kp_make_exchange
token=${KP_RL[exchange]}/token
KP_DEVICE=auto KP_ENGINE_ARGS=()
kp_engine_words
words=("${KP_ENGINE_WORDS[@]}")
""",
}


@pytest.mark.parametrize("script", ENGINES)
def test_the_token_of_the_engines_is_in_a_file_for_this_user_alone(
    tmp_path: Path, script: str
) -> None:
    """A new one at each start; it is no word of an engine's command line."""
    told = """
[[ " ${words[*]} " =~ " --token-file"[=\\ ](.*/)?token" " ]]
[[ " ${words[*]} " != *" --token"[=\\ ]* ]]
[[ " ${words[*]} " != *"$(<"$token")"* ]]
stat -c %a "$token" "${token%/*}"
cat "$token"
"""
    tokens = set()
    for _ in range(2):
        done = bash(ENGINES[script] + told, PLACE=str(tmp_path), KEMPNER_SITE=os.devnull)
        assert done.returncode == 0, done.stderr
        mode, above, token = done.stdout.split()
        assert mode == "600" and (script == "serve.sh" or above == "700")
        assert len(token) == 48
        tokens.add(token)
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("my_token", "x", True),
        ("OPENAI_APIKEY", "x", True),
        ("https_proxy", "http://me:passw0rd@proxy:3128", True),
        ("https_proxy", "http://proxy:3128/a@b", False),
        ("MONKEY", "x", False),
        ("BASH_FUNC_module%%", "() { :; }", False),
    ],
)
def test_what_is_a_secret(name: str, value: str, secret: bool) -> None:
    done = bash('kp_is_secret "$NAME" && echo True || echo False', NAME=name, **{name: value})
    assert (done.stdout, done.stderr) == (f"{secret}\n", "")


@pytest.mark.parametrize("name", ["SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"])
def test_a_profile_asks_for_nothing_that_sbatch_drops(tmp_path: Path, name: str) -> None:
    (tmp_path / "site.d").mkdir()
    (tmp_path / "site.d/mine.env").write_text(f"{name}=4G\n")
    done = bash("KP_ROOT=$COPY; kp_read_site", COPY=str(tmp_path), KEMPNER_SITE="mine")
    assert done.returncode == 2 and f"sbatch silently ignores {name}: give" in done.stderr
