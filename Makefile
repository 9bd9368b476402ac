# `make run` and `make test` set up what they need in .venv, once.

# The first interpreter that the project supports; override with `make PYTHON=/path/to/python3.12`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PROMPT ?= def main(
VENV := .venv
BIN := $(VENV)/bin
# vLLM asks for other versions of some libraries than the rest.
VLLM := .venv-vllm
# What is compiled into the package.
KERNELS := hatch_build.py tq_ops/cpu/build.py $(wildcard tq_ops/cpu/csrc/*)
LIBRARY := tq_ops/cpu/_kernels.so
# Set once the library holds every instruction set, which tests need.
EVERY_SET := $(VENV)/kernels.stamp
PIP := -m pip install --quiet --disable-pip-version-check

# Few of the modules that come are ever imported: pip compiles none of them to bytecode, and each is once it is imported.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test fuzz test-long test-shaken test-judge test-npu test-gpu test-cuda-compile test-cuda-long test-vllm test-vllm-short test-peers test-real lab lab-aicore lab-ptx lint wheels bench clean

help:
	@echo "make run     continue PROMPT with the model that ships and a 4-bit KV cache"
	@echo "make test    linters, types, tests, and the vLLM plug-in's on one real server"
	@echo "make fuzz    thousands of malformed inputs; SEED=1 draws others"
	@echo "make test-long  more of the tests of the CPU, the formats and the command"
	@echo "make test-shaken  the tests with torch's sums as three other machines may compute them, then with older instructions; SEED=1 takes one"
	@echo "make test-judge  the validator: every fault of its self-test, and more honest runs"
	@echo "make test-npu  the NPU programs at length, in the interpreter of PyPTO"
	@echo "make test-gpu  the CUDA executor and its kernels, compiled, on an NVIDIA GPU"
	@echo "make test-cuda-compile TRITON=FOLDER  every launch of the CUDA executor, compiled for four kinds of GPU; no GPU needed"
	@echo "make test-cuda-long  more of the GPU kernels in Triton's interpreter"
	@echo "make test-vllm  the vLLM plug-in at length, on the real server with many flags"
	@echo "make test-peers  llama.cpp beside ours: compiles it for this CPU first, minutes; REAL=FOLDER takes GGUF files, too"
	@echo "make test-real REAL=FOLDER  pretrained GGUF files beside transformers"
	@echo "make lab     the laboratory's tests: studies, rivals and emulators, minutes"
	@echo "make lab-aicore PTO_ISA=FOLDER  the NPU programs' C++, executed with the CPU backend of pto-isa"
	@echo "make lab-ptx  the GPU kernels at length, their PTX executed on the CPU, hours"
	@echo "make lint    linters and types only"
	@echo "make wheels  the sdist and wheels for x86-64, ARM and any machine, in dist; needs g++-aarch64-linux-gnu for ARM"
	@echo "make bench   decode latency of the reference, as one JSON line"
	@echo "make clean   remove .venv and .venv-vllm"

run: $(VENV)/run.stamp
	@$(BIN)/tq generate --model tiny --kv tq4 --prompt '$(PROMPT)' --max-new-tokens 96 --temperature 0.6 --top-p 0.9

test:
	@# Both environments side by side: pip takes one core. So does PyPTO's calculator, which two tests would wait for.
	@$(MAKE) --no-print-directory --jobs=2 --keep-going $(VENV)/npu.stamp $(VLLM)/stamp || true
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -n 2 --dist worksteal
	@# Wheels of vLLM exist for few platforms, too.
	@if $(MAKE) --no-print-directory $(VLLM)/stamp; then $(MAKE) --no-print-directory test-vllm-short; \
		else echo "vLLM cannot be installed here: its tests are skipped" >&2; fi

fuzz: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist worksteal --no-header -rs -m fuzz --hypothesis-seed=$(or $(SEED),0) tests/tq tests/engine tests/models

test-long: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist worksteal --no-header -rs -m long

# A seed is a machine whose FP32 sums end in other last bits; a capability is one whose torch has fewer vector instructions.
test-shaken: $(VENV)/dev.stamp
	@failed=; for seed in $(or $(SEED),1 2 3); do \
		$(BIN)/pytest -n 2 --dist worksteal --no-header --shaken $$seed || failed="$$failed seed $$seed;"; done; \
	for isa in avx2 default; do \
		ATEN_CPU_CAPABILITY=$$isa $(BIN)/pytest -n 2 --dist worksteal --no-header || failed="$$failed $$isa;"; done; \
	test -z "$$failed" || { echo "red:$$failed" >&2; exit 1; }

test-judge: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist worksteal --no-header -rs -m judge_long tests/validation tests/tq/test_validation_cli.py

test-npu: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist worksteal -m 'npu or npu_long' --no-header -rs

test-gpu: $(VENV)/dev.stamp
	$(BIN)/pytest --no-header -rs tests/tq_ops/cuda tests/tq_ops/test_block_products.py tests/tq_ops/test_delta_tables.py tests/executors/test_cuda_executor.py tests/executors/test_cuda_step.py tests/engine/test_sampling.py

# TRITON: a folder with another Triton than the installed one, as its wheel unpacks.
test-cuda-compile: $(VENV)/dev.stamp
	$(BIN)/pytest --no-header -rs -m cuda_compile $(if $(TRITON),--triton "$(TRITON)") tests/tq_ops/cuda/test_cuda_compile.py tests/tq_ops/cuda/test_decode_compiled.py

test-cuda-long: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist worksteal --no-header -rs -m cuda_long tests/tq_ops tests/executors tests/models tests/engine

# REAL: a folder of GGUF files.
test-real: $(VENV)/dev.stamp
	@test -n "$(REAL)" || { echo "name a folder of GGUF files: make test-real REAL=FOLDER" >&2; exit 2; }
	$(BIN)/python $(PIP) -c constraints.txt 'accelerate>=1.10,<2'
	$(BIN)/pytest --no-header -rs -s -m real --real "$(REAL)" tests/models/test_real_checkpoints.py

test-vllm-short: $(VLLM)/stamp
	$(VLLM)/bin/python -m pytest --no-header -rs -m vllm_short tests/serving

test-vllm: $(VLLM)/stamp
	$(VLLM)/bin/python -m pytest --no-header -rs tests/serving

test-peers: $(VENV)/dev.stamp
	$(BIN)/python $(PIP) -c constraints.txt -r lab/requirements.txt
	$(BIN)/pytest -c lab/pytest.ini --no-header -rs $(if $(REAL),--real "$(REAL)") lab/tests/bench

lab: $(VENV)/dev.stamp
	$(BIN)/pytest -c lab/pytest.ini -n 2 --dist worksteal --no-header -rs -m 'not long' lab/tests

# LONG=1: also whole layers of `tiny`, orders of tasks, and Qwen3-14B, hours.
# CLANG: a clang of version 19 or newer with libc++; without it clang++-19 or clang++ of the path.
lab-aicore: $(VENV)/dev.stamp
	@test -n "$(PTO_ISA)" || { echo "name a checkout of pto-isa: make lab-aicore PTO_ISA=FOLDER" >&2; exit 2; }
	$(BIN)/pytest -c lab/pytest.ini --no-header -rs $(if $(LONG),,-m 'not long') --pto-isa "$(PTO_ISA)" $(if $(CLANG),--clang "$(CLANG)") lab/tests/npu

lab-ptx: $(VENV)/dev.stamp
	$(BIN)/pytest -c lab/pytest.ini -n 2 --dist worksteal --no-header -rs lab/tests/ptx

wheels: $(VENV)/dev.stamp
	$(BIN)/python hatch_build.py dist

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror tq_ops/*/csrc/*

bench: $(VENV)/dev.stamp
	$(BIN)/tq bench decode --model tiny --executor reference --dtype float32 --contexts 512 --kv fp32,bf16,tq4 --only step --json

clean:
	rm -rf $(VENV) $(VLLM)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "haarkv needs Python 3.11 or 3.12; name one with make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# What is installed depends on these files alone; the project itself is installed editable.
$(VENV)/run.stamp: pyproject.toml constraints.txt $(KERNELS) | $(LIBRARY)
	$(BIN)/python $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt $(KERNELS) | $(EVERY_SET)
	@# Wheels of the npu extra exist for few platforms; without it its tests say so and are counted as skipped.
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev,npu]' || { $(BIN)/python $(PIP) -c constraints.txt -e '.[dev]' && \
		echo "the npu extra cannot be installed here: its tests will be skipped" >&2; }
	@touch $(VENV)/run.stamp $@

$(VENV)/npu.stamp: $(VENV)/dev.stamp
	@$(BIN)/python -c 'from haarkv.tq_ops.npu.sim.worker import built_calculator as b; b()' >/dev/null 2>&1 || true
	@touch $@

$(VLLM)/stamp: pyproject.toml serving/vllm_plugin/install.py $(KERNELS) | $(EVERY_SET)
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) 'torch==2.13.0' 'pytest>=8.4,<10'
	$(VLLM)/bin/python $(PIP) -e .
	$(VLLM)/bin/python -m haarkv.serving.vllm_plugin.install
	@touch $@

# Compiled once, before two installations would each do it; without a compiler the package is installed without them. `make run`
# needs the instruction set of this machine alone.
$(LIBRARY): $(KERNELS) | $(BIN)/python
	@$(BIN)/python tq_ops/cpu/build.py --native || true

$(EVERY_SET): $(KERNELS) | $(BIN)/python
	@$(BIN)/python tq_ops/cpu/build.py || true
	@touch $@
