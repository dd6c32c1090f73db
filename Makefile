# The front door for developers. Each target is one command that can as well be typed.
.DEFAULT_GOAL := help
bin := .venv/bin

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## set up .venv with everything tests need
	./setup.sh --tests

check: ## what a commit must pass: format, lint, types, unit tests, committed files current
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/pytest -n auto tests/unit
	$(bin)/imagefactory lock --check
	$(bin)/imagefactory render --check

format: ## format and mend what ruff can
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

unit: ## unit tests only: seconds, no network, no root
	$(bin)/pytest -n auto tests/unit

test: ## everything, as CI runs it
	tests/run

nightly: ## the same on large inputs, all families, long storms
	tests/run nightly

floors: ## the first table of docs/benchmarks.md, against the least work; a quarter of an hour
	$(bin)/python -m benchmarks --folder .benchmark --trials 3 --write floors

bench: ## the benchmark: both tables and pictures of docs/benchmarks.md; hours
	$(bin)/python -m benchmarks --folder .benchmark --write

site: ## the documentation as a site in site/, its reference made from the code; a warning ends it
	$(bin)/sphinx-build --quiet --fail-on-warning --fresh-env --write-all --doctree-dir build/doctrees -c docs . site

picture: ## the front page's picture of the matrix
	IMAGEFACTORY_STORE=build/none $(bin)/imagefactory report 'pytorch-[12]*' 'jax-0*' 'tensorflow-2*' 'onnxruntime-1*' -o docs/matrix.svg --format svg

scanned: ## scan the frameworks' wheels of the locks that were not yet (fetches each, keeps none)
	$(bin)/python -m imagefactory.actions.scan_wheels --write --locks

mutants: ## do the unit tests notice a changed product? 60 changes, a quarter of an hour
	$(bin)/python -m tests.mutants

requirements: ## solve the project's own dependencies anew
	$(bin)/uv pip compile --quiet --universal --generate-hashes --no-header --python-version 3.11 \
	    --extra all requirements/tools.in pyproject.toml --output-file requirements/build.txt
	$(bin)/uv pip compile --quiet --universal --generate-hashes --no-header --python-version 3.11 \
	    --extra dev requirements/tools.in pyproject.toml --output-file requirements/dev.txt
	for framework in jax onnxruntime; do echo $$framework | $(bin)/uv pip compile --quiet --generate-hashes --no-header \
	    --no-annotate --python-version 3.11 - --output-file requirements/$$framework.txt; done
	sed -n '/^py-rattler==/,/[^\\]$$/p' requirements/build.txt | grep -v '# via' >imagefactory/build/rattler.txt

.PHONY: help setup check format unit test nightly floors bench site scanned mutants picture requirements
