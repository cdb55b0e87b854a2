# make demo | make test. Needs python3 (3.11 or newer), g++ (12 or newer) and make; the rest goes into .venv.
PYTHON ?= python3
TORCH := 2.13
VERSION ?= 2.14
VENV := .venv
BUILD := build
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# What pip installs: exact files by their hashes where release/requirements.txt knows them.
REQUIRED := $(BIN)/python release/required.py

MODELS ?= resnet50 mobilenet_v2
FUZZ_MODELS ?= 10000
MINUTES ?= 30

.PHONY: help built extension demo test test-all quick test-torch asan tsan fuzz soak bench wheel docs \
	lint clean

help:
	@echo "make demo    classify a picture with a blocked network"
	@echo "make test    run the test suite on every instruction set of this CPU"
	@echo "make test-all   the same with more random models, inputs, files and calls"
	@echo "make quick STEM=winograd   build, and run the tests whose file or folder is named so"
	@echo "make test-torch VERSION=2.14   the same for another torch, in an environment of its own"
	@echo "make wheel   build wheels for Python 3.11 to 3.13, each for every supported torch: dist/"
	@echo "make fuzz    inputs by coverage, then random models in every form: make fuzz MINUTES=30 FUZZ_MODELS=1000"
	@echo "make asan    build with the address and undefined sanitizers, and run a part of the suite"
	@echo "make tsan    build with the thread sanitizer, and run what uses threads"
	@echo "make soak    callers, models and sizes that come and go: make soak MINUTES=30"
	@echo "make bench   time models in every format: make bench MODELS='resnet18 unet'"
	@echo "make docs    build the site of the documents: build/docs/index.html"
	@echo "make lint    run the formatters and linters, and check the types"
	@echo "make clean   remove the build; delete $(VENV)* to start from nothing"

# Alone and first, so that nothing later brings another torch.
# Nothing is compiled before it is imported: most of torch and of the tools never is.
$(VENV)/torch-installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torch_blocked: expected Python 3.11 or newer, got %d.%d; run: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) download --no-deps --dest $(VENV)/torch "$$($(REQUIRED) download $(TORCH))"
	$(REQUIRED) torch $(TORCH) | $(PIP) install --no-compile --no-index --no-deps --find-links $(VENV)/torch -r /dev/stdin
	rm -r $(VENV)/torch
	touch $@

# The last line brings what a CUDA build of torch needs besides.
$(VENV)/tools-installed: $(VENV)/torch-installed
	$(REQUIRED) build $(TORCH) | $(PIP) install -r /dev/stdin
	$(PIP) install --no-compile "torch==$(TORCH).*"
	touch $@

# The first build happens in here: pip runs setup.py, which runs CMake.
$(BUILD)/installed: pyproject.toml setup.py $(VENV)/tools-installed
	$(REQUIRED) run $(TORCH) | $(PIP) install -r /dev/stdin
	TORCH_BLOCKED_BUILD_DIR=$(BUILD) $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# What the demo can do without.
$(BUILD)/dev-installed: $(BUILD)/installed
	$(REQUIRED) dev $(TORCH) | $(PIP) install --no-compile -r /dev/stdin
	touch $@

# Later builds are CMake's alone; it knows what changed.
built: $(BUILD)/installed
	@$(BIN)/cmake --build $(BUILD)

extension: built $(BUILD)/dev-installed

demo: built
	$(BIN)/python examples/classify.py

test: extension
	$(BIN)/python test/run_isas.py

test-all: extension
	TORCH_BLOCKED_TEST_ALL=1 $(BIN)/python test/run_isas.py

# Builds the kernels that this CPU runs, and no others; the next build makes those.
QUICK_SETS := $(shell grep -qsm1 avx512bw /proc/cpuinfo && echo "AVX2;AVX512" || { grep -qsm1 avx2 /proc/cpuinfo && echo AVX2 || echo DEFAULT; })
quick: $(BUILD)/installed $(BUILD)/dev-installed
	@$(BIN)/cmake -D TORCH_BLOCKED_SETS="$(QUICK_SETS)" $(BUILD) > /dev/null
	@$(BIN)/cmake --build $(BUILD); built=$$?; $(BIN)/cmake -U TORCH_BLOCKED_SETS $(BUILD) > /dev/null; exit $$built
	$(BIN)/python test/run_isas.py --stem "$(STEM)"

# On the best instruction set only: what depends on torch is the same for all.
test-torch:
	$(MAKE) TORCH=$(VERSION) VENV=.venv-torch$(VERSION) BUILD=build/torch$(VERSION) extension
	TORCH_BLOCKED_BUILD_DIR=build/torch$(VERSION) .venv-torch$(VERSION)/bin/pytest -n auto --maxprocesses 4 --dist worksteal

asan: extension
	$(BIN)/python test/sanitizers/run.py address

tsan: extension
	$(BIN)/python test/sanitizers/run.py thread

soak: extension
	$(BIN)/python test/soak/soak.py --minutes $(MINUTES)

wheel: $(BUILD)/dev-installed
	$(REQUIRED) release $(TORCH) | $(PIP) install -r /dev/stdin
	$(BIN)/python release/wheels.py

fuzz: extension
	$(REQUIRED) fuzz $(TORCH) | $(PIP) install -r /dev/stdin
	failed=; for each in "fuzz/fuzz.py --minutes $(MINUTES)" \
	    "random/fuzz_models.py --models $(FUZZ_MODELS)" \
	    "random/fuzz_files.py --files $(FUZZ_MODELS)" \
	    "random/random_edges.py --models $(FUZZ_MODELS)" "random/random_inputs.py --models 20"; do \
	  $(BIN)/python test/$$each || failed="$$failed, $$each"; \
	done; if [ "$$failed" ]; then echo "failed$$failed"; exit 1; fi

bench: built
	$(BIN)/python -m torch_blocked bench models $(MODELS)

# The source folder is the root, so that links between files are the same here and there.
docs: extension
	$(BIN)/sphinx-build -W -b html -c docs . build/docs

lint: $(BUILD)/dev-installed
	$(BIN)/pre-commit run --all-files
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info src/*.egg-info src/torch_blocked/torch*/
