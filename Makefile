# Everything runs in .venv, which is installed again only when the stamp is older than
# pyproject.toml or constraints.txt. pip keeps its own settings (PIP_INDEX_URL, pip.conf ...).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.autopar-installed
SITE   := $(VENV)/.autopar-docs-installed
PYTEST := $(BIN)/python -m pytest -p tests.helpers.tiers
SHARD  := 1/1

# One thread per rank: ranks that share cores are several times slower with more.
export OMP_NUM_THREADS := 1
# Bytecode is kept: tests start dozens of processes, and each would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=
# Processes draw hash seeds of their own, so that tests of equal plans compare different ones.
export PYTHONHASHSEED :=

.PHONY: demo compare bench-plan bench-config bench-zoo bench-layouts fuzz bench-runtime bench-compile bench-checks bench-checkpoints bench-mixed same-plans validate-local test first-tier test-browser nightly faults lint golden docs docs-site page parity test-gpu validate install clean

# Trains on four processes; plans a Llama of 8 layers for 16 GPUs and draws it; a short comparison.
demo: install
	$(BIN)/python examples/train_gpt2.py
	$(BIN)/python -m examples.joint_plan --layers 8
	$(BIN)/python -m examples.compare --pairs 3
	$(BIN)/python -m examples.compare_pipeline --pairs 3 --microbatches 4

# On two processes: the Megatron recipe beside tensor parallelism by hand and DTensor's, then
# 1F1B beside torch's; losses, collectives, step times.
compare: install
	$(BIN)/python -m examples.compare
	$(BIN)/python -m examples.compare_pipeline

# How long planning takes for models of 8 to 70 billion parameters on 8 to 1024 GPUs, phase by phase.
bench-plan: install
	$(BIN)/python -m examples.bench_plan

# What a user waits for, from a config.json to a plan of Llama-8B and 70B: CPU seconds of the whole
# command in new processes, medians of five. Some three minutes; nothing else should run.
bench-config: install
	$(BIN)/python -m examples.bench_config

# The same as bench-plan for every small model of the zoo on three meshes, on a CPU profile and a GPU's. Half an hour.
bench-zoo: install
	$(BIN)/python -m tests.parity.plan_zoo

# Published layouts of 8 to 2,048 GPUs beside the plan that the search finds: predicted steps, CPU seconds. Half an hour.
bench-layouts: install
	$(BIN)/python -m examples.published_layouts $(ARGS)

# Step times of what autopar generates beside eager, Megatron by hand, DDP, FSDP2 and torch's pipeline
# schedules, on one and two processes. Some four minutes. ARGS="--compiled --activation gelu_new": with compiled
# regions, of a model where fusing matters; "--delayed --compiled": overlap under a slow network.
bench-runtime: install
	$(BIN)/python -m examples.bench_runtime $(ARGS)

# What compile="regions" takes to compile: with no compiled kernels on disk, and with them. Two minutes.
bench-compile: install
	$(BIN)/python -m examples.bench_compile

# What the checks of a step take, of the demo's GPT-2 on two processes.
bench-checks: install
	$(BIN)/python -m examples.bench_checks

# What saving takes, of a GPT-2 on two processes: at once, and beside training. A minute.
bench-checkpoints: install
	$(BIN)/python -m examples.bench_checkpoints

# Predictions of plans in mixed precision beside published runs of Llama-3 and GPT-175B. A minute.
bench-mixed: install
	$(BIN)/python -m examples.bench_mixed

# Plans and generated programs of this tree beside those of another commit, byte for byte, in some
# 95 cases: make same-plans BASE=main~1. Some ten minutes.
same-plans: install
	$(BIN)/python -m tests.parity.same_plans --against $(BASE)

# Predicted beside measured on this machine: a GPT-2 and a Llama on 2 and 4 processes, step times
# and peak memory, after the machine was measured. Some six minutes; nothing else should run.
validate-local: install
	$(BIN)/python -m examples.validate_local

# The first tier: lint, types, doors, and the tests that find most faults per second; at most ten
# minutes on two cores. Lint runs beside the tests: both are run to their end, or either fails.
test: install
	$(MAKE) --jobs=2 --keep-going --no-print-directory lint first-tier

# Two workers: one core each. A file stays with one; all files that start processes with the same
# (tests/helpers/distribution.py), so pools are shared. What a test may take: tests/helpers/tiers.py.
first-tier: install
	$(PYTEST) --first-tier -n 2 --dist loadfile

# Pages in a headless Chromium (chromium and chromedriver; on Debian also chromium-driver): every
# click, every number, and a Llama-70B on 128 GPUs, whose size and loading time it prints.
test-browser: install
	$(BIN)/python -m pytest -m browser tests/browser -rP -k 70b
	$(BIN)/python -m pytest -m browser tests/browser -k "not 70b"

# The page's bundle from its sources; needs Node.
page:
	cd autopar/report/page/web && npm ci --ignore-scripts && npm run build

# The second tier: more seeds, layouts and models of the same, and what takes long: whole ILPs, two
# hosts, killed ranks, a Llama on 64 GPUs. In parts: make nightly SHARD=1/4.
nightly: install
	$(PYTEST) -m nightly --shard=$(SHARD) -n 2 --dist worksteal --timeout=3600

# 10,000 random programs that nobody has drawn before, on 1, 2 and 4 thread ranks; some hours.
fuzz: install
	AUTOPAR_HUNT=1 $(PYTEST) -m nightly tests/fuzz/programs -n 2 --dist worksteal --timeout=3600

# 1,000 random faults of ranks (killed, stopped, raising, exiting) in small runs: does every process
# end, is the rank named, does the run go on to the same bits. Some fifty minutes.
faults: install
	$(BIN)/python -m tests.faults.kills

# On a machine with a GPU: its own tests (flash kernels, steps without waiting, NCCL on as many GPUs
# as there are, calibration), then parity of random programs, whose ranks are threads on one GPU.
test-gpu: export AUTOPAR_TEST_DEVICE = cuda
test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m pytest $(PARITY_ON_THREADS)

PARITY_ON_THREADS := $(addprefix tests/parity/test_, random_programs.py experts_planned.py \
  sequence_parallel.py planned_parity.py equal_blocks.py split_backward.py) \
  tests/runtime/test_recompute.py tests/runtime/test_pipeline_runtime.py \
  tests/rules/test_attention_lowering.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy autopar tests
	$(BIN)/lint-imports

# Rewrites tests/golden; read the diff before committing it.
golden: install
	$(BIN)/python -m pytest --update-golden

# Writes docs/rules.md from the rules, docs/habits.md from the habits, docs/pictures; a test fails
# where one is stale.
docs: install
	$(BIN)/python -m tests.rules.page
	$(BIN)/python -m tests.habits.page
	$(BIN)/python -m docs.pictures.draw

# The site, in build/docs: plans of the gallery, some four minutes, then Sphinx; a warning or a link
# that leads nowhere fails. Pictures of plans need Graphviz's dot.
docs-site: $(SITE)
	$(BIN)/python -m docs.gallery.make
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs

# Models x meshes x plans x microbatches on real processes against one process: 126 cells of one
# stage, 100 of pipelines; then the families of tests/parity/zoo x meshes x plans. Words choose cells:
# .venv/bin/python -m tests.parity.table zoo bert tensor
parity: install
	$(BIN)/python -m tests.parity.table

# Predictions beside published training runs, the targets they must meet, and how well the runs of
# a paper are predicted by a fit to the others: that takes minutes, `autopar validate` seconds.
validate: install
	$(BIN)/autopar validate --leave-one-out

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("autopar needs Python 3.11 or newer; set PYTHON=") \
	  if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,examples]'
	@touch $@

# Sphinx and its theme: only for the site.
$(SITE): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	@touch $@

# Keeps .venv: remove that by hand.
clean:
	rm -rf build dist src/autopar.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	  .hypothesis docs/gallery/made $(STAMP) $(SITE)
	find autopar passes cost runtime tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
