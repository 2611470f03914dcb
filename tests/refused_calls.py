"""Rewards where the kernel refuses some system calls, in a mount namespace whose /dev/shm and /tmp
have files of the host: `python -m tests.refused_calls NAME... -- ENVIRONMENT [UNSAFE]` prints JSON.
A NAME is one of NUMBERS."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.extensions.rl.config import EnvConfig
from kempner.extensions.rl.environments.opening import Tasks
from kempner.extensions.rl.environments.sandbox import landlock, limits, system_calls
from kempner.extensions.rl.environments.sandbox.scorer import Scorer
from tests.conftest import ROOT
from tests.rewards import score

OURS = (ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix))
PLACES = ("/dev/shm", *(() if any(path.is_relative_to("/tmp") for path in OURS) else ("/tmp",)))
OTHERS = {"x86_64": {"unshare": 272, "mount": 165}, "aarch64": {"unshare": 97, "mount": 40}}
NUMBERS = {
    **OTHERS[platform.machine()],
    "mount_setattr": limits.SYS_MOUNT_SETATTR,
    "landlock": landlock.CREATE_RULESET,
}
ERRORS = dict.fromkeys(("unshare", "mount"), errno.EPERM)
ERRORS |= dict.fromkeys(("mount_setattr", "landlock"), errno.ENOSYS)
WRITE = f"open('{PLACES[-1]}/segment', 'w')"


def own_mounts() -> None:
    """Empty file systems at PLACES, which nobody else sees, with files of "somebody"."""
    user, group = os.getuid(), os.getgid()
    limits._check(limits._libc.unshare(limits.NEWUSER | limits.NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    limits._check(limits._libc.mount(None, b"/", None, limits.MS_REC | limits.MS_PRIVATE, None))
    for place in PLACES:
        limits._check(limits._libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"mode=1777"))
        for name in ("segment", "staged/shard"):
            path = Path(place, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("of the host")


def files() -> dict[str, str]:
    found = (path for place in PLACES for path in Path(place).rglob("*"))
    return {str(path): path.read_text() if path.is_file() else "" for path in found}


def main(words: list[str]) -> None:
    names, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    own_mounts()
    before = files()
    system_calls.install_filter({NUMBERS[name]: ERRORS[name] for name in names})
    args = '{"seconds": 5.0}' if rest[0] == "code" else ""
    env = Tasks(EnvConfig(rest[0], args=args, unsafe="unsafe" in rest), 0)
    task = env.task(0)
    right = task.answer if rest[0] != "code" else f"{WRITE}\n{OPEN_FUNCTION}"
    task = task if rest[0] != "code" else task._replace(answer="assert f(2) == 4")
    said: list[str] = []
    with contextlib.closing(Scorer(1, said.append)) as scorer:
        try:
            scorer.check([env])
            refused = ""
        except ConfigError as error:
            refused = str(error)
        rewards = [score(scorer, env, task, right) for _ in range(2)]
    print(json.dumps({
        "rewards": [each.reward for each in rewards], "why": rewards[0].why, "said": said,
        "refused": refused, "same": files() == before,
    }))  # fmt: skip


OPEN_FUNCTION = "def f(x): return 2 * x"

if __name__ == "__main__":
    main(sys.argv[1:])
