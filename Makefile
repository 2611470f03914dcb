# make train   a language model learns on this machine; again: it goes on, or says that it is complete
# make test    everything, also on a real Slurm of several hosts, whose packages it installs where it may
# make soak    the faults of tests/fault that take longer, too, and 30 random ones in one run
# make check   ruff, mypy, shellcheck, shfmt
# make cluster / make cluster-down   a real Slurm of virtual hosts on this machine (root)
.PHONY: train test soak check cluster cluster-down
.ONESHELL:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
PY := .venv/bin/python
# Elsewhere the tests on Slurm are skipped, and say why.
INSTALL_SLURM := if [[ $$EUID == 0 ]] && command -v apt-get >/dev/null; then bash scripts/slurm/testbed.sh install; fi
SHELL_FILES := $(wildcard scripts/slurm/*.sh benchmarks/*.sh) .ci/run

train: .venv/train data/stdlib/dataset.json
	@$(PY) scripts/train.py configs/train/quickstart.toml $(ARGS)
	$(PY) scripts/report.py runs/quickstart
	echo
	echo "a text sampled from the model:"
	$(PY) scripts/generate.py runs/quickstart --prompt "def " --max-tokens 200
	echo
	echo "metrics:    runs/quickstart/metrics.jsonl"
	echo "checkpoint: runs/quickstart/checkpoints/$$(readlink runs/quickstart/checkpoints/latest)"
	echo "loss curve: runs/quickstart/report.png"

data/stdlib/dataset.json: | .venv/train
	@$(PY) scripts/prepare_data.py --source stdlib --out data/stdlib

test: .venv/dev data/stdlib/dataset.json
	@$(INSTALL_SLURM)
	$(PY) -m pytest $(ARGS)

soak: .venv/dev
	@$(INSTALL_SLURM)
	$(PY) -m pytest tests/fault tests/ray -m "soak or not soak" $(ARGS)
	$(PY) -m benchmarks.soak --faults 30 --seed 1

check: .venv/dev
	@.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/shellcheck -x $(SHELL_FILES)
	.venv/bin/shfmt -i 4 -ci -d $(SHELL_FILES)

cluster: .venv/train data/stdlib/dataset.json
	@bash scripts/slurm/testbed.sh install
	bash scripts/slurm/testbed.sh up

cluster-down:
	@bash scripts/slurm/testbed.sh down

# torch==2.13.0 of constraints.txt: a looser word would bring another build on some machines.
.venv/train: pyproject.toml constraints.txt
	@[[ -x $(PY) ]] || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot]'
	touch $@

.venv/dev: .venv/train
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,data,ray,dev]'
	touch $@
