# Winnow: what a newcomer types. `make` alone lists it.

PYTHON ?= python3
# Pinned, because an open range lets pip pick a newer CUDA build with gigabytes of libraries that no CPU run needs.
# Any build that the range in pyproject.toml admits will do: make setup TORCH=path/to/torch.whl
TORCH ?= torch==2.13.0
# What is imported is compiled when it is first imported, and kept: most of what comes with torch never is.
PIP := .venv/bin/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
READY := .venv/.ready

# Those whose dependencies are small.
PLUGINS := $(foreach name,drafts stores events inspect ollama vllm beams,-e ./plugins/$(name))

.DEFAULT_GOAL := help
.PHONY: help setup test test-gpu test-extras test-ray test-dynamo bench-gpu size demo real-model real-models real-demo real-eval payoff lint docs screens format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv, build the CPU kernels and install Winnow with its tools

$(READY): pyproject.toml lab/pyproject.toml $(wildcard plugins/*/pyproject.toml) $(wildcard native/* native/kernels/*)
	$(PYTHON) -m venv .venv
	@echo "1 of 2: $(TORCH), a few hundred megabytes"
	$(PIP) $(TORCH)
	@echo "2 of 2: the CPU kernels, some minutes of two cores, beside Winnow and its tools"
	@(while sleep 10; do echo "  $$(find build -name '*.o' -newer .venv/pyvenv.cfg 2>/dev/null | wc -l) files compiled"; done) & \
		watch=$$!; $(PIP) -e '.[dev]' -e './lab[dev]' $(PLUGINS); code=$$?; kill $$watch; exit $$code
	@touch $@

# One process per core with one thread each: tiny models gain nothing from more threads. Who is done takes over half of
# what another has left, which keeps the tests of a file, and their fixtures, mostly together.
test: lint ## lint, types and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $$(getconf _NPROCESSORS_ONLN) --dist worksteal

# The environment of `make setup` where there is one, else what has torch, transformers, triton and pytest: nothing is built.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# One process: those of several share a card's memory. What means a CPU says so by the marker `cpu`.
test-gpu: ## the test suite on the GPU of this machine
	PYTHONPATH=src:lab WINNOW_TEST_GPU=1 $(GPU_PYTHON) -m pytest -q $(ARGS)

# Other arguments: make bench-gpu ARGS='--parts limits,attention --vllm-python ~/vllm/bin/python'
bench-gpu: ## a page about the GPU of this machine in six minutes
	PYTHONPATH=src:lab $(GPU_PYTHON) -m winnow_lab.gpu $(ARGS)

# Built for the PyTorch beside it: make test-extras TORCHVISION=path/to/torchvision.whl where TORCH is one for CPUs.
TORCHVISION ?= torchvision==0.28.0

# Once before each release. Redis' server is started by the tests; a skip that names this target fails.
test-extras: $(READY) ## what `make test` skips and needs no GPU: torchvision, redis-server, humming, Ray, Dynamo
	$(PIP) --no-deps '$(TORCHVISION)'
	$(PIP) -e ./plugins/humming
	$(BIN)/python -c 'import torchvision' || { $(BIN)/python -m pip uninstall -q -y torchvision; \
		echo '$(TORCHVISION) is of another build than torch: TORCHVISION=path/to/torchvision.whl'; exit 1; }
	WINNOW_TEST_EXTRAS=1 $(BIN)/python -m pytest -q plugins/stores plugins/humming tests/models/test_images.py \
		tests/attention/test_triton_compiles.py
	$(MAKE) test-ray test-dynamo

test-ray: $(READY) ## the tests on a Ray cluster of this machine, with Ray installed
	$(BIN)/pip install -q -e './plugins/ray[serve]'
	$(BIN)/python -m pytest -q plugins/ray

test-dynamo: $(READY) ## the tests behind NVIDIA Dynamo's frontend, with Dynamo installed
	$(BIN)/pip install -q -e ./plugins/dynamo
	$(BIN)/python -m pytest -q plugins/dynamo

size: ## lines of source by folder, against their budget
	@$(PYTHON) tests/source_size.py

lint: $(READY) ## style, security rules and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## the pages as a site in build/site, links and anchors checked
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screens: real-model ## the pictures of pages in docs/screens, in Chromium
	$(BIN)/python -m tests.server.screens docs/screens $(REAL_MODEL)

format: $(READY) ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(READY) ## answer long prompts twice in the same KV memory, whole and compressed, with the embedded model
	$(BIN)/python examples/demo/compare.py

REAL_MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf

real-model: $(READY) ## fetch SmolLM2-135M-Instruct, a GGUF file of 98 MB, into models/
	$(BIN)/winnow pull smollm2

real-models: $(READY) ## fetch Gemma-3-270M too, a GGUF file of 253 MB with sliding windows
	$(BIN)/winnow pull smollm2 gemma3

# The whole cache first, then a quarter of it: the table at the end of each says how many answers are right.
real-demo: real-model ## answer chat prompts with SmolLM2, with the whole cache and with a quarter of it
	$(BIN)/winnow run examples/real/prompts.jsonl -o runs/real-demo.jsonl --overwrite --model $(REAL_MODEL)
	$(BIN)/winnow run examples/real/prompts.jsonl -o runs/real-demo-evicted.jsonl --overwrite --model $(REAL_MODEL) \
		--eviction kvzip --compression 4

# More arguments: make real-eval ARGS='--samples 8 --tokens 2048'
real-eval: real-model ## accuracy of policies on the real model; resumes where it was stopped
	$(BIN)/python -m winnow_lab.real $(ARGS)

# Hours, and a few GB of other engines below runs/peers. More arguments: make payoff ARGS='--rounds 1 --works p1'
payoff: real-model ## whether compression pays on real models, beside other engines; resumes where it was stopped
	$(BIN)/python lab/winnow_lab/peers/payoff.py $(ARGS)

clean: ## remove the environment, caches and results
	rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
