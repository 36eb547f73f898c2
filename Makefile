# Two commands: `make demo` and `make test`. A third, `make proof`, holds what is slow because it is real.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
READY := $(VENV)/.ready
WORK := work
WORKERS ?= 2
export UV_PYTHON_DOWNLOADS := never
export OMP_NUM_THREADS ?= 2

.PHONY: demo airflow test tests coverage proof lint lock clean

demo: $(READY)
	$(BIN)/gemline simulate --simulator conf/simulator/demo.yaml --out $(WORK)/demo/raw
	$(BIN)/gemline run --spec conf/specs/simulator.yaml --raw $(WORK)/demo/raw --lake $(WORK)/demo/lake --days 2026-01-01:2026-01-11

airflow: $(READY)
	test -d $(WORK)/demo/raw || $(BIN)/gemline simulate --simulator conf/simulator/demo.yaml --out $(WORK)/demo/raw
	$(BIN)/gemline airflow --spec conf/specs/simulator.yaml --raw $(WORK)/demo/raw --lake $(WORK)/airflow/lake --days 2026-01-01:2026-01-09 2026-01-10 2026-01-11

# Tests and lint side by side; it fails where either does.
test: $(READY)
	@$(BIN)/python requirements/check.py --tests $(WORKERS)
	@$(MAKE) --no-print-directory --jobs 2 tests lint

tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not proof" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

proof: $(READY)
	@$(BIN)/python requirements/check.py --tests $(WORKERS)
	$(BIN)/python -m tests.proof

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not proof" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-branch --cov-report term:skip-covered

lint: $(READY)
	$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/mypy

$(READY): $(LOCK) requirements/setup.txt pyproject.toml
	@$(PYTHON) requirements/check.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/setup.txt
	$(BIN)/uv pip sync --compile-bytecode --python $(BIN)/python requirements/setup.txt $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -m etl.runtime.java
	@touch $(READY)

lock:
	$(BIN)/uv pip compile requirements/setup.in --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate --generate-hashes -o requirements/setup.txt
	$(BIN)/uv pip compile pyproject.toml --extra airflow --extra spark --extra train --extra serve --extra s3 --extra dev --extra bench --extra cpu \
	  --override requirements/overrides.txt --python-version 3.11 --no-header --no-emit-index-url --no-annotate --generate-hashes -o requirements/cpu.txt
	$(BIN)/uv pip compile pyproject.toml --extra spark --extra train --extra serve --extra s3 --extra gpu \
	  --override requirements/overrides-gpu.txt --python-version 3.11 --no-header --no-emit-index-url --no-annotate --generate-hashes -o requirements/gpu.txt

clean:
	rm -rf $(WORK)
