# Each target does all of its own set-up, and nothing twice.
#   make test     lint, types, tests         make demo    the needle demo on a trained model
#   make quick    under a minute: parts of each kind, some laws, one model, nothing by Inductor
#   make check    lint and types alone
#   make test-all   the tests that take minutes too          make test-gpu   those that a GPU runs on itself
#   make fuzz   caches used in any way, with random models and seeds, for MINUTES; it prints the seed of a failure
#   make format   rewrite in house style     make clean   remove all that make has made
#   make experiments   the papers' experiments into results/, and the pages; ONLY="table1 pareto", ARGS=--quick
#   make page     tables of docs/ and README.md from results/
#   make models   two real models and four texts, for specache-bench; ONLY="smollm2 austen" for some
#   make peers    the environment of the methods that specache-bench eval compares with (kvpress)
#   make peers-cpu   the environment of OpenVINO and llama.cpp, for specache-bench decode --peers
#   make wheel    a wheel in dist/ with the C++ libraries built; needs a C++ compiler
#   make architectures   the table of all model types; ONLY="llama opt" for some, ARGS=--again for all anew

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests run in so many processes, one torch thread each.
WORKERS ?= 2
PYTEST_ARGS ?=
MINUTES ?= 60

STAMP := $(VENV)/installed
# What mypy reads: the package as it will be installed. It can't follow setuptools' mapping of passes/ and runtime/.
TYPES := build/types

.DEFAULT_GOAL := test
.PHONY: install lint types check quick test test-all test-gpu fuzz wheel demo models peers peers-cpu experiments page architectures format clean

# torch is named here, so that it and all that needs it are resolved together, to the version in constraints.txt. Triton
# is not in there: a torch for CUDA brings the one that it was built with, and the newest does for the interpreter.
$(STAMP): pyproject.toml benchmarks/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch \
	    --editable '.[test,triton]' --editable 'benchmarks[all]'
	touch $@

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	rm -rf $(TYPES)
	mkdir -p $(TYPES)/specache_fx
	ln -s $(CURDIR)/specache_fx/* $(CURDIR)/passes $(CURDIR)/runtime $(CURDIR)/examples $(TYPES)/specache_fx/
	ln -s $(CURDIR)/benchmarks/specache_bench $(TYPES)/
	MYPYPATH=$(TYPES) $(BIN)/mypy --package specache_fx --package specache_bench

check: lint types

# The inner loop. Each of them takes seconds.
QUICK := tests/unit/capture/graph/test_trace.py tests/unit/capture/graph/test_graph_utils.py \
    tests/unit/capture/caches/test_heads_first.py tests/unit/passes/test_decode_graphs.py \
    $(addprefix tests/unit/runtime/test_, quant_kivi.py quant_methods.py select.py metrics.py sink_rows.py \
    token_history.py mask_rows.py machine_memory.py packing.py) \
    tests/unit/test_layering.py tests/laws/test_laws.py::test_kivi_equals_the_dense_oracle \
    'tests/models/test_models.py::test_tokens_equal_eager_with_bits_16[llama]'
quick: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal $(QUICK) \
	    --deselect tests/unit/passes/test_decode_graphs.py::test_layers_of_one_trace_keep_their_numbers_and_weights

test: check
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 15 $(PYTEST_ARGS)

test-all: PYTEST_ARGS += -m ""
test-all: test

# One process: it has the GPU.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.fuzz $(MINUTES) $(WORKERS)

# From a copy: this checkout builds its libraries at first use, and build/ may hold files that are gone. The libraries
# need this system's libc or a newer one, and a torch that is no older than 2.11.
WHEEL := build/wheel
wheel: $(STAMP)
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)
	git ls-files -z specache_fx passes runtime examples pyproject.toml README.md LICENSE | xargs -0 cp --parents -t $(WHEEL)
	$(BIN)/python -P $(WHEEL)/runtime/native/cpp_build.py
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist \
	    --config-settings "--build-option=--plat-name=$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform())')" $(WHEEL)

demo: $(STAMP)
	$(BIN)/specache-fx demo

# Into $SPECACHE_DATA or the cache folder of the user; what is there is not fetched again.
models: $(STAMP)
	$(BIN)/specache-bench models $(ONLY)

# Under 2 hours on 2 cores, and it goes on where it was interrupted. Presses run where `make peers` was run before.
experiments: $(STAMP)
	$(BIN)/specache-bench experiment $(or $(ONLY),all) $(ARGS)
	$(MAKE) page

page: $(STAMP)
	$(BIN)/specache-bench page

# 25 to 50 minutes on 2 cores, and it goes on where it was interrupted.
architectures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/architectures/walk.py $(ONLY) $(ARGS)

# kvpress pins another transformers, so it lives in an environment of its own. These two work together.
PEERS := .venv-peers
$(PEERS)/installed:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 kvpress==0.5.5 transformers==5.2.0
	touch $@

peers: $(PEERS)/installed

# OpenVINO and llama.cpp for `specache-bench decode --peers`. llama.cpp is built for this processor, which takes 5
# minutes on 2 cores. A CPU build of torch can't load the torchvision that optimum-intel brings, and needs none.
PEERS_CPU := .venv-peers-cpu
$(PEERS_CPU)/installed:
	test -x $(PEERS_CPU)/bin/python || $(PYTHON) -m venv $(PEERS_CPU)
	$(PEERS_CPU)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 openvino==2026.4.1 \
	    optimum-intel==2.2.0 gguf==0.19.0
	$(PEERS_CPU)/bin/python -m pip uninstall --quiet --yes torchvision
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEERS_CPU)/bin/python -m pip install --quiet --disable-pip-version-check \
	    llama-cpp-python==0.3.36
	touch $@

peers-cpu: $(PEERS_CPU)/installed

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS_CPU) build dist *.egg-info benchmarks/*.egg-info benchmarks/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
