# Two commands for a new machine: `make demo` and `make test`. Both make their own environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_FOLDER ?= runs/demo
IF_STALE ?= --if-stale
SWEEP_FOLDER ?= build/sweep-resume
# Releases of PyTorch that a wheel brings compiled kernels for.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# The oldest PyTorch that pyproject.toml promises.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)

.PHONY: demo test check checked wheel gate format lint types tests oldest docs sweep sweep-resume mangled trackers zero quantized architectures cluster bench benchmark benchmark-long gpu clean

demo: $(VENV)/train.stamp  ## environment, install, train a LongNet on real text, sample from it
	@if [ -f $(RUN_FOLDER)/model.safetensors ]; then \
		echo "$(RUN_FOLDER) is trained already: sampling from it (make demo RUN_FOLDER=runs/other trains anew)"; \
	elif ls -d $(RUN_FOLDER)/checkpoint-* > /dev/null 2>&1; then \
		$(BIN)/dilated-attention train --resume $(RUN_FOLDER); \
	else \
		$(BIN)/dilated-attention train --output $(RUN_FOLDER); \
	fi
	$(BIN)/dilated-attention generate $(RUN_FOLDER) --prompt "def main(" --max-new-tokens 300

test: $(VENV)/dev.stamp  ## environment, install, everything the gate checks
	$(MAKE) gate

# What `make check` runs: laws, oracle, patterns, models, the command.
CHECKED := tests/ops/test_attend_equals_the_oracle.py tests/ops/test_attend_laws.py tests/ops/test_merge.py \
	tests/ops/test_wrong_calls.py tests/patterns tests/plan tests/nn/test_modules.py tests/models \
	tests/cli/test_command.py tests/cli/test_show.py tests/test_options.py tests/test_package.py tests/test_readme.py

check: $(VENV)/dev.stamp  ## the laws of attention, patterns, models and the command: minutes
	$(BIN)/pytest -n 2 --dist worksteal $(CHECKED)

checked:
	@echo $(CHECKED)

wheel: $(VENV)/wheel.stamp  ## sdist, wheel, and wheel for Linux on x86-64 with kernels for the releases TORCH, into dist/, each installed and tried where nothing else is; the last without a compiler
	rm -rf dist build/wheel build/kernels build/linux
	$(BIN)/python -m build --outdir dist .
	for release in $(TORCH); do \
		rm -rf build/wheel && $(PYTHON) -m venv build/wheel && \
		build/wheel/bin/pip install --quiet "torch==$$release" && \
		PYTHONPATH=src build/wheel/bin/python -m dilated_attention_pytorch.kernels.wheel build/kernels || exit 1; \
	done
	DILATED_ATTENTION_KERNELS=$(CURDIR)/build/kernels $(BIN)/python -m build --outdir build/linux .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so --wheel-dir dist build/linux/*.whl
	for made in dist/*; do \
		path="$$PATH"; forbidden=0; impl=native; \
		case $$made in *manylinux*) path="$(CURDIR)/build/wheel/bin";; *.tar.gz) forbidden=1; impl=aten;; esac; \
		rm -rf build/wheel && $(PYTHON) -m venv build/wheel && \
		build/wheel/bin/pip install --quiet --constraint constraints.txt "$$made" && \
		(cd build/wheel && export XDG_CACHE_HOME="$$PWD/cache" DILATED_ATTENTION_NO_BUILD=$$forbidden PATH="$$path" && \
			bin/python ../../tests/smoke.py $$impl && bin/dilated-attention info) || exit 1; \
	done

gate: lint types tests docs

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

# Bytecode is written even where the environment says otherwise: the programs that tests start would compile the package.
tests:
	$(BIN)/dilated-attention build || true
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal --durations 25

oldest: $(VENV)-oldest/dev.stamp  ## the tests on the oldest PyTorch that is promised, kernels compiled by its Triton among them; its wheels bring CUDA, 5 GB
	$(VENV)-oldest/bin/pytest -n 2 --dist worksteal

docs: $(VENV)/docs.stamp  ## the documentation site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

sweep: $(VENV)/dev.stamp  ## the tests that take long; the drawn cases again, ten times as many, other draws; a run compiled by Inductor; 20 stopped ranks
	$(BIN)/pytest -n 2 -m slow tests
	HYPOTHESIS_PROFILE=sweep $(BIN)/pytest -n 2 tests/ops tests/plan tests/kernels tests/parallel/test_parallel_equals_the_oracle.py tests/parallel/test_plan_parallel.py tests/integrations/test_architectures.py tests/training/test_compiled.py
	$(BIN)/python tests/parallel/stop_trials.py

sweep-resume: $(VENV)/dev.stamp  ## runs on every mesh that are killed 5 times or broken, and taken up: the same bits at the end; faults that runs survive
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/training/killed_runs.py $(SWEEP_FOLDER)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/training/broken_runs.py $(SWEEP_FOLDER)

mangled: $(VENV)/dev.stamp  ## 5,000 run folders and 1,000 other inputs, damaged at random: refused, or read as they were written
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m training.mangled_inputs --trials 5000 --seed 0 --kind "run folder"
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m training.mangled_inputs --trials 1000 --seed 0

trackers: $(VENV)/dev.stamp $(VENV)/track.stamp  ## Weights & Biases (offline) and MLflow hold what a run logs; both are large
	$(BIN)/pytest tests/training/test_other_trackers.py

zero: $(VENV)/dev.stamp $(VENV)/deepspeed.stamp  ## DeepSpeed's ZeRO, every stage: the losses, weights and moments of one process
	$(BIN)/pytest tests/training/test_zero.py tests/training/test_offload_files.py

quantized: $(VENV)/dev.stamp $(VENV)/torchao.stamp  ## weights in 8 bits, and training in float8, by torchao, which is too large for the gate
	$(BIN)/pytest tests/training/test_torchao.py

architectures: $(VENV)/dev.stamp  ## every architecture of the installed transformers judged anew, into the docs
	$(BIN)/python -m benchmarks.architectures

cluster: $(VENV)/dev.stamp  ## the files of examples/cluster, run as far as one machine goes: Slurm, Kubernetes, TorchX
	test -x $(VENV)-cluster/bin/torchx || $(PYTHON) -m venv $(VENV)-cluster
	$(VENV)-cluster/bin/pip install --quiet torchx kubernetes-validate
	PATH="$(CURDIR)/$(VENV)-cluster/bin:$$PATH" $(BIN)/python tests/examples/cluster_jobs.py

bench: $(VENV)/dev.stamp  ## times beside dense, FlexAttention and the published route, under 5 minutes
	$(BIN)/dilated-attention bench --preset cpu

benchmark: $(VENV)/dev.stamp  ## the figures of the README and the docs that are of other code, on this machine: up to 2 hours on two cores; IF_STALE= measures all
	$(BIN)/python -m benchmarks.selection $(IF_STALE)
	$(BIN)/python -m benchmarks.attention $(IF_STALE) --output benchmarks/results/attention_cpu.json
	$(BIN)/python -m benchmarks.attention $(IF_STALE) --rows 16384 --head-dims 48 96 128 --repeats 3 --output benchmarks/results/attention_head_dims.json
	$(BIN)/python -m benchmarks.attention $(IF_STALE) --avx2 --rows 16384 --impl native
	$(BIN)/python -m benchmarks.attention $(IF_STALE) --impl aten --rows 16384
	$(BIN)/python -m benchmarks.decoding $(IF_STALE) --only kernel --output benchmarks/results/decoding_kernel.json
	$(BIN)/python -m benchmarks.decoding $(IF_STALE) --impl aten --only model
	$(BIN)/python -m benchmarks.blocks $(IF_STALE)
	$(BIN)/python -m benchmarks.host $(IF_STALE)
	$(BIN)/python -m benchmarks.recall $(IF_STALE) --seeds 0
	$(BIN)/python -m benchmarks.parallel $(IF_STALE)
	$(BIN)/python -m benchmarks.slide_encoder $(IF_STALE) --lengths 20000 --repeats 2 --output benchmarks/results/slide_encoder_native.json
	$(BIN)/python -m benchmarks.slide_encoder $(IF_STALE) --impl aten
	$(BIN)/python -m benchmarks.linear $(IF_STALE)
	$(BIN)/python -m benchmarks.scores $(IF_STALE)
	$(BIN)/python -m benchmarks.slides $(IF_STALE) --slides 40
	$(BIN)/python -m benchmarks.slide_training $(IF_STALE)
	$(BIN)/python -m benchmarks.slide_maps $(IF_STALE)
	$(BIN)/python -m benchmarks.slide_study $(IF_STALE)
	$(BIN)/python -m benchmarks.training_memory $(IF_STALE)
	$(BIN)/python -m benchmarks.transformers_memory $(IF_STALE) --most-dense 16384
	$(BIN)/python -m benchmarks.tables

benchmark-long: $(VENV)/dev.stamp  ## what benchmark leaves out: random steps, planned and measured; training for long contexts: hours
	$(BIN)/python -m benchmarks.planner $(IF_STALE)
	$(BIN)/python -m benchmarks.long_context $(IF_STALE)

gpu: $(VENV)/dev.stamp  ## on a machine with a GPU: is it right, how fast, within its memory; again goes on; DRY=1 tries it on a CPU
	$(BIN)/python -m benchmarks.gpu $(if $(DRY),--dry-run)

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Nothing but what is named here is installed; the constraints pin it.
$(VENV)/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

$(VENV)-oldest/dev.stamp: pyproject.toml constraints.txt
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	sed '/^torch==/d; s/^numpy==.*/numpy<2.4/' constraints.txt > $(VENV)-oldest/constraints.txt  # Triton 3.6's interpreter
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt "torch==$(OLDEST).*" --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-cluster build dist src/*.egg-info
