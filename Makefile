# make demo    set up, then watch a toy detector being trained by rollout matching
# make test    set up, then run the quick tests: minutes on two cores
# make test-slow  tests that start engines or processes, kill them, or run the documents' commands
# make nightly tests of hours: 20,000 new examples of each property, random kills, two hosts; the image
# make image   the container image rollmatch:cpu; EXTRA=gpu makes the other one (3 GB to download)
# make mutants changes the pure stages in small ways, one at a time: which do their tests not see?
# make reliability  hours of generated calls, fuzzing and load, as in docs/evidence.md
# make bench   every benchmark, hours on a quiet machine, and its table in docs/evidence.md
# make lint    style, types, import contracts, room budgets, requirement table, documents, deployment files
# make check   what CI runs: make test, make lint, make test-slow
# make format  let ruff rewrite what it can
# make dist    the wheel and the sdist, in dist/
# make setup   the environment alone
#
# PYTHON=python3.12 takes another interpreter, and ARGS goes to the program that is run:
# make test ARGS="-k parsing", make test-slow ARGS=tests/integration/test_kills.py,
# make demo ARGS="--seed 1". EXTRA=gpu takes the GPU build of vLLM, which runs no CPU server:
# make test EXTRA=gpu ARGS=tests/gpu.

EXTRA ?= cpu
ARGS ?=
BIN := .venv/bin
# Two processes run the tests, each file in one of them (tests/conftest.py).
WORKERS ?= --numprocesses=2 --dist=loadgroup --no-loadscope-reorder
SHELL_SCRIPTS := .ci/run deploy/train_stage2.sh deploy/slurm/train.sbatch \
	$(addprefix scripts/,dist docker_engine lock setup)
PYTEST := $(BIN)/python -m pytest $(WORKERS) --durations=25

.PHONY: demo test test-slow nightly image reliability bench check mutants lint format setup setup-dev dist

demo: setup
	$(BIN)/learner demo $(ARGS)

test: setup-dev
	$(PYTEST) -m 'not slow and not nightly' $(ARGS)

test-slow: setup-dev
	$(PYTEST) -m 'slow and not nightly' $(ARGS)

nightly: setup-dev
	$(BIN)/python -m pytest -m nightly --hypothesis-profile=nightly --timeout=0 $(ARGS)
	$(BIN)/python -m pytest tests/unit -m hypothesis --hypothesis-profile=nightly --timeout=0 $(ARGS)
	@if docker info >/dev/null 2>&1; then $(MAKE) image; else echo "no Docker Engine: no image is built" >&2; fi

image:
	docker build -f deploy/Dockerfile --build-arg EXTRA=$(EXTRA) -t rollmatch:$(EXTRA) .

reliability: setup-dev
	$(BIN)/python -m pytest tests/contract/test_openapi.py --hypothesis-profile=nightly --timeout=0
	$(BIN)/python tests/fuzz/parser.py -runs=1000000
	$(BIN)/python -m benchmarks.reliability.load

bench: setup-dev
	$(BIN)/python -m benchmarks $(ARGS)

check: test lint test-slow

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/private_imports
	$(BIN)/python scripts/req_table
	$(BIN)/python scripts/house --check
	$(BIN)/python scripts/doc_links
	$(BIN)/python scripts/api_reference.py --check
	$(BIN)/python scripts/config_reference.py --check
	$(BIN)/python scripts/metrics_reference.py --check
	$(BIN)/python scripts/server_reference.py --check
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/docker-compose.yaml
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/kubernetes-validate --strict deploy/kubernetes.yaml
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

mutants: setup-dev
	$(BIN)/mutmut run $(ARGS)
	$(BIN)/mutmut results

format: setup-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

dist: setup
	@scripts/dist

setup:
	@scripts/setup $(EXTRA)

setup-dev:
	@scripts/setup $(EXTRA)-dev
