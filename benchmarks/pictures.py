"""The pictures of the pages, made by today's programs.

    python -m benchmarks.pictures                  # all that take minutes; needs root and tmux
    python -m benchmarks.pictures scale lowcomm    # some
    python -m benchmarks.pictures soak             # a quarter of an hour; needs Chromium

status, tmux: runs on a test bed of two hosts, one of which fails on purpose; rl: `make rl`, and its
report; scale, lowcomm: drawn anew from the recorded figures; soak: soak.png, page.png and
page-phone.png, of a run with 30 faults.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lowcomm import draw
from benchmarks.scale_table import plot, read
from benchmarks.soak import cluster_of, say
from tests.cluster import ROOT, SCRIPTS, Cluster
from tests.trainer.fault.broken_run import until

PICTURES = ROOT / "docs/pictures"
FAULTY = {"KEMPNER_TRAIN": str(ROOT / "tests/trainer/fault/faulty_train.py")}
COLUMNS, ROWS = 140, 50
DARK, LIGHT = "#1c1e26", "#e6e6e6"
COLORS = ["#1c1e26", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#e6e6e6"]
SGR = re.compile(r"\x1b\[([\d;]*)m")


def terminal(text: str, out: Path, columns: int = COLUMNS) -> None:
    """Draw what a terminal shows; `text` may have colors (SGR)."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    found = font_manager.findfont("DejaVu Sans Mono")
    font = ImageFont.truetype(found, 17)
    width, height, edge = round(font.getlength("M" * 100)) / 100, 21, 14
    lines = text.rstrip().splitlines()
    size = (round(columns * width) + 2 * edge, len(lines) * height + 2 * edge)
    image = Image.new("RGB", size, DARK)
    pen = ImageDraw.Draw(image)
    front, back = LIGHT, DARK
    for row, line in enumerate(lines):
        column, y = 0, edge + row * height
        for i, part in enumerate(SGR.split(line)):
            if i % 2:
                front, back = colors(part, front, back)
                continue
            x = edge + column * width
            if back != DARK:
                pen.rectangle((x, y, x + len(part) * width, y + height), fill=back)
            pen.text((x, y), part, fill=front, font=font)
            column += len(part)
    image.save(out)


def colors(codes: str, front: str, back: str) -> tuple[str, str]:
    """Those of the text after some SGR codes."""
    for code in map(int, (codes or "0").split(";")):
        if code == 0:
            front, back = LIGHT, DARK
        elif 30 <= code <= 37:
            front = COLORS[code - 30]
        elif 40 <= code <= 47:
            back = COLORS[code - 40]
        elif code in (39, 49):
            front, back = (LIGHT, back) if code == 39 else (front, DARK)
    return front, back


def of_runs(wanted: set[str]) -> None:
    """status.png and tmux.png: four runs, one of which still trains."""
    with tempfile.TemporaryDirectory() as folder, cluster_of(2, Path(folder), 2) as cluster:
        home = Path(folder)
        (home / "runs").mkdir()
        if "status" in wanted:
            submit(cluster, home, "baseline", 40)
            submit(cluster, home, "lr-0.1", 40, faults="nan from=0 to=9999")
            kill = "kill at=kempner.train.step:guard_update:before nth=15"
            submit(cluster, home, "long-context", 200, faults=kill, KEMPNER_MAX_CRASHES="2")
        once = f"{home}/once"
        faults = f"kill at=kempner.train.step:guard_update:before nth=90 rank=3 once={once}\n"
        faults += "slow ms=150 rank=3"
        job = submit(cluster, home, "two-nodes", 1500, faults=faults, wait=False, nodes=2)
        run = home / "runs/two-nodes"
        until(lambda: goes_on(run), 600)
        if "status" in wanted:
            command = ["bash", str(SCRIPTS / "status.sh")]
            shown = cluster.run(*command, cwd=home, env={"COLUMNS": "110"}).stdout
            terminal(f"$ bash scripts/slurm/status.sh\n{shown}$", PICTURES / "status.png", 112)
        if "tmux" in wanted:
            terminal(screen(cluster, home), PICTURES / "tmux.png")
        cluster.run("scancel", job)


def goes_on(run: Path) -> bool:
    """Does it train again, after its crash?"""
    events, lines = run / "attempts.jsonl", run / "metrics.jsonl"
    return (
        events.exists()
        and events.read_text().count('"first_step"') > 1
        and len(lines.read_text().splitlines()) > 60
    )


def submit(
    cluster: Cluster, home: Path, name: str, steps: int, *, faults: str = "", wait: bool = True,
    nodes: int = 1, **env: str,
) -> str:  # fmt: skip
    words = cluster.debug_run(
        Path("runs") / name, f"--train.max_steps={steps}", "--checkpoint.interval=20",
        "--metrics.log_interval=2", "--checkpoint.keep_last_n=1",
    )  # fmt: skip
    options = [f"--job-name={name}", f"--nodes={nodes}", "--gpus-per-node=2", "--time=60"]
    env |= {**FAULTY, "FAULTS": faults}
    job = cluster.sbatch("multinode.sh", *words, options=options, cwd=home, env=env)
    if wait:
        say(f"{name}: exit code {cluster.wait(job)}")
    return job


def screen(cluster: Cluster, home: Path) -> str:
    """What tmux.sh shows, seen by a tmux around it."""
    env = {"TMUX_TMPDIR": str(home), "TERM": "screen-256color", "PS1": "$ "}

    def tmux(server: str, *words: str) -> str:
        return cluster.run("tmux", "-L", server, *words, cwd=home, env=env).stdout

    command = f"bash {SCRIPTS / 'tmux.sh'} runs/two-nodes"
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    # With TMUX set the inner tmux would refuse to be nested.
    tmux("outer", "new-session", "-d", *size, f"env -u TMUX {command}")
    try:
        time.sleep(25)
        tmux("outer", "send-keys", "squeue -o '%.6i %.10j %.9T %.8M %.10L %.5D %N'", "Enter")
        time.sleep(5)
        shown = tmux("outer", "capture-pane", "-p", "-e")
        # The prompt is that of whoever makes the picture.
        shown = re.sub(r"(?:(?<=m)|(?<=\n))\w+@\S+:\S+[#$]", "$", shown)
        return re.sub(r"[^\x1b -~\n\u2500-\u257f]", "", shown)
    finally:
        for server in ("outer", "default"):
            tmux(server, "kill-server")


def of_rl() -> None:
    """rl.png: the report of `make rl`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs/arithmetic"
        words = ["configs/rl/arithmetic.toml", f"--run.dir={run}"]
        subprocess.run(["bash", SCRIPTS / "rl.sh", *words], cwd=ROOT, check=True)
        subprocess.run([sys.executable, ROOT / "scripts/report.py", "runs/arithmetic"],
                       cwd=folder, check=True)  # fmt: skip
        shutil.copy(run / "report.png", PICTURES / "rl.png")


def of_soak(faults: int = 30) -> None:
    """soak.png, page.png and page-phone.png: the timeline and the page of a run with faults."""
    from PIL import Image

    from tests.browser import browser

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "soak"
        words = ["--faults", str(faults), "--seed", "1", "--keep", str(kept)]
        subprocess.run([sys.executable, "-m", "benchmarks.soak", *words], cwd=ROOT, check=True)
        run = kept / "kit/run"
        for page in ([], ["--html"]):
            command = [sys.executable, str(ROOT / "scripts/report.py"), "run", *page]
            subprocess.run(command, cwd=run.parent, check=True)
        shutil.copy(run / "timeline.png", PICTURES / "soak.png")
        with browser() as opened:
            for name, width in (("page", 1100), ("page-phone", 375)):
                out = PICTURES / f"{name}.png"
                opened.open(run / "report.html", width)
                opened.picture(out, 1500)
                Image.open(out).convert("P", palette=Image.Palette.ADAPTIVE).save(out)


def main() -> None:
    quick = ("status", "tmux", "rl", "scale", "lowcomm")
    names = (*quick, "soak")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pictures", nargs="*", choices=[*names, []], metavar="|".join(names))
    wanted = set(parser.parse_args().pictures or quick)
    if "scale" in wanted:
        now, before = (read(str(PICTURES / f"scale{x}.json")) for x in ("", "-before"))
        plot(now, before, str(PICTURES / "scale.png"))
    if "lowcomm" in wanted:
        draw_recorded()
    if "rl" in wanted:
        of_rl()
    if wanted & {"status", "tmux"}:
        of_runs(wanted)
    if "soak" in wanted:
        of_soak()


def draw_recorded() -> None:
    """Plot lowcomm.png from the table of its page: the median, the lowest and the highest."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) % \(([\d.]+) to ([\d.]+)\)",
        (ROOT / "docs/extensions/lowcomm.md").read_text(),
        re.MULTILINE,
    )
    ratios = {name.replace("`", ""): [float(x) / 100 for x in found] for name, *found in rows}
    draw({"no communication": [1.0], **ratios}, PICTURES / "lowcomm.png")


if __name__ == "__main__":
    main()
