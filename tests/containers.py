"""Containers for the tests: an image that they make themselves, and the runtimes that enter it.

Charliecloud is the real one. pyxis and apptainer, which Debian does not package, are shims that
take the same options and enter the same image by chroot in a mount namespace, so that what is not
mounted is not there, and what the image sets hides what the job has set. Where srun itself has
pyxis, the tests run through it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster import ROOT, TESTBED, program

RUNTIMES = ("charliecloud", "pyxis", "apptainer")
HIDING = {"PYTHONPATH": "/image/lib", "OMP_NUM_THREADS": "99", "NCCL_DEBUG": "THE_IMAGE"}
# What an image would have of its own, and this one has of the host.
OF_THE_HOST = ("/usr", ROOT, sys.base_prefix, sys.prefix, sysconfig.get_path("purelib"))
PARTS = {str(Path(path).resolve()) for path in OF_THE_HOST}
REAL_SRUN = shutil.which("srun") or ""

# enter IMAGE FROM:TO,... DIRECTORY [writable] -- COMMAND: as root. An image that is a file, a tar
# archive, is unpacked.
ENTER = """#!/bin/bash
set -eu
if [[ ${ENTERED:-} != 1 ]]; then
    echo "$1 on $(uname -n)" >>CALLS
    sleep DELAY
    ENTERED=1 exec unshare --mount --propagation private bash "$0" "$@"
fi
unset ENTERED
image=$1 mounts=$2 directory=$3 mode=ro
shift 3
[[ $1 != writable ]] || { mode=rw && shift; }
shift
scratch=$(mktemp -d)
mount -t tmpfs none "$scratch" && mkdir "$scratch"/{upper,work,root,image}
[[ -d $image ]] || { tar -C "$scratch/image" -xf "$image" && image=$scratch/image; }
root=$scratch/root
mount -t overlay none -o "lowerdir=$image,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
for part in proc sys dev; do mount --rbind "/$part" "$root/$part"; done
mount -t tmpfs none "$root/tmp"
IFS=,
for mount in $mounts; do
    mkdir -p "$root${mount#*:}"
    mount --rbind "${mount%%:*}" "$root${mount#*:}"
done
[[ $mode == rw ]] || mount -o remount,ro "$root"
mapfile -t sets <"$root/etc/environment"
exec chroot "$root" /usr/bin/env -C "$directory" "${sets[@]}" "$@"
"""
SRUN = """#!/bin/bash
[[ $1 != --help ]] || { echo --container-image=; exit; }
image='' words=() mounts='' directory=/
while [[ ${1:-} == -* ]]; do
    case $1 in
        --container-image=*) image=${1#*=} ;;
        --container-mounts=*) mounts=${1#*=} ;;
        --container-workdir=*) directory=${1#*=} ;;
        --no-container-mount-home) ;;
        *) words+=("$1") ;;
    esac
    shift
done
[[ -n $image ]] || exec REAL_SRUN "${words[@]}" "$@"
[[ $mounts$image$directory != *[[:space:]]* ]] || { echo "pyxis: a blank" >&2 && exit 1; }
exec REAL_SRUN "${words[@]}" "${0%/*}/enter" "$image" "$mounts" "$directory" MODE -- "$@"
"""
APPTAINER = """#!/bin/bash
[[ $1 == exec && $2 == --bind && $4 == --pwd ]] || exit 255
exec "${0%/*}/enter" "$6" "$3" "$5" MODE -- "${@:7}"
"""


def image(folder: Path, *directories: Path, archive: bool = False) -> Path:
    """A root of its own, with its own environment and an env that knows no --block-signal.
    `directories` are there to be mounted on, which ch-run asks for; `archive`: as one file."""
    root = folder / "image"
    for name in ("proc", "sys", "dev", "tmp", "etc", "run", "home", "ch", "var/tmp", "image/lib"):
        (root / name).mkdir(parents=True)
    for path in (*PARTS, *directories):
        (root / str(path).lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (root / "etc" / name).write_bytes(Path("/etc", name).read_bytes())
    program(root / "image/bin", "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    env = '#!/bin/sh\ncase $1 in --block*) exit 125 ;; esac\nexec /usr/bin/env "$@"\n'
    program(root / "image/bin", "env", env)
    sets = {**HIDING, "PATH": "/image/bin:/usr/local/bin:/usr/bin:/bin"}
    text = "".join(f"{name}={value}\n" for name, value in sets.items())
    for name in ("ch", "etc"):
        (root / name / "environment").write_text(text)
    if archive:
        subprocess.run(["tar", "-C", root, "-cf", folder / "image.sqsh", "."], check=True)
        return folder / "image.sqsh"
    return root


def container(
    runtime: str, folder: Path, of: Path, writable: bool = False, delay: float = 0
) -> dict[str, str]:
    """The environment of a job in the image `of`. FOLDER/entered has a line for each container that
    a shim has made, which takes it `delay` seconds."""
    env = {
        "KEMPNER_CONTAINER": str(of),
        "KEMPNER_CONTAINER_RUNTIME": runtime,
        "KEMPNER_MOUNTS": ",".join(f"{part}:{part}" for part in sorted(PARTS)),
        "KEMPNER_PYTHON": "",  # the image's
        "PATH": os.environ["PATH"],
    }
    if runtime == "charliecloud":
        if not shutil.which("ch-run"):
            skip = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            skip(f"not installed: ch-run; run {TESTBED} install")
        return env
    if runtime == "pyxis" and has_pyxis():
        if of.is_dir():
            squashed = of.with_suffix(".sqsh")
            subprocess.run(["mksquashfs", of, squashed, "-quiet"], check=True)
            env["KEMPNER_CONTAINER"] = str(squashed)
        return env
    mode = "writable" if writable else ""
    enter = ENTER.replace("CALLS", f"{folder}/entered").replace("DELAY", str(delay))
    shim = {"pyxis": SRUN, "apptainer": APPTAINER}[runtime].replace("REAL_SRUN", REAL_SRUN)
    name = {"pyxis": "srun", "apptainer": "apptainer"}[runtime]
    program(folder / "bin", "enter", enter)
    return env | program(folder / "bin", name, shim.replace("MODE", mode))


def has_pyxis() -> bool:
    """Whether srun itself starts containers."""
    done = subprocess.run([REAL_SRUN, "--help"], capture_output=True, text=True)
    return "--container-image" in done.stdout


def entered(folder: Path) -> list[str]:
    """The hosts of the containers that a shim has made, in order."""
    file = folder / "entered"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.rpartition(" ")[2] for line in lines]
