# Everything a fresh clone needs is Python 3.11+ and make; the rest is installed into .venv once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# a core for each of the two workers
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest

unexport PYTHONDONTWRITEBYTECODE  # the tests start Python dozens of times: what is compiled is kept

.PHONY: demo test suite types style docs test-ranks test-cluster test-browser torture notebooks release format requirements clean

demo: $(READY)  ## what pairs and answers bring, on the bundled digits
	$(BIN)/constraintmatch demo --out demo

# all at once: the types take a core for half a minute; what the suite says is shown as it comes, the rest when it ends
test: $(READY)  ## what a commit must pass: format, lint, types, the documentation builds, the suite
	@$(MAKE) --no-print-directory --jobs 2 --output-sync --keep-going suite style docs types

# asserts as Python has them: to rewrite them takes 7 s of a fresh clone; those that fail run again and say their values
suite: $(READY)
	+$(PYTEST) -n 2 --dist worksteal --assert=plain || ($(PYTEST) --last-failed --last-failed-no-failures none; false)

style: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: $(READY)
	$(BIN)/mypy --no-error-summary

docs: $(READY)  ## the documentation site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-ranks: $(READY)  ## several processes of the command line train together: killed, started again, stopped
	$(PYTEST) -m ranks tests/training/test_ranks.py tests/pipeline/test_compare.py

test-cluster: $(READY)  ## a local Ray cluster and a PostgreSQL server, workers killed; installs Ray and psycopg2
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet "ray>=2.40" "psycopg2-binary>=2.9"
	$(PYTEST) -m cluster tests/pipeline

test-browser: $(READY)  ## the page in a real Chromium, the API fuzzed; installs Playwright and schemathesis
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode -r requirements-browser.txt
	$(BIN)/python -c "import shutil, sys; sys.exit(not any(map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))))" || $(BIN)/playwright install chromium
	$(BIN)/python -m pytest -m browser tests/browser

torture: $(READY)  ## kills, signals, bad inputs, small disks and broken files, counted in one table (minutes; SEED=1)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python torture --seed $(or $(SEED),0)

notebooks: $(READY)  ## run the notebooks of the documentation again (minutes)
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet nbclient ipykernel
	$(BIN)/python docs/make_notebooks.py

release: $(READY)  ## wheel and sdist into dist/, each tried in an empty environment: PYTHONS="3.11 3.12 /path/to/python3.13"
	rm -rf dist
	$(BIN)/uv build --quiet
	for python in $(or $(PYTHONS),3.11); do \
		PYTHONPATH= $(BIN)/uvx --isolated --python $$python --from dist/*.whl constraintmatch demo --out dist/demo-$$(basename $$python) && \
		PYTHONPATH= $(BIN)/uvx --isolated --python $$python --from dist/*.tar.gz constraintmatch --version || exit 1; \
	done

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

requirements: $(READY)  ## pin anew what pyproject.toml allows
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --upgrade --generate-hashes --no-annotate --no-header --no-emit-index-url -o requirements.txt
	$(BIN)/uv pip compile pyproject.toml --extra browser --universal --no-annotate --no-header --no-emit-index-url -c requirements.txt -o requirements-browser.txt

$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv  # a pip of its own takes 5 s; uv needs none
	test -x $(BIN)/uv || $(PYTHON) -m pip --python $(BIN)/python install --quiet uv || \
		($(BIN)/python -m ensurepip && $(BIN)/python -m pip install --quiet uv)
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet -r requirements.txt
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-deps -e .
	touch $(READY)

clean:
	rm -rf .venv demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
